"""What the demo asks: chats of different lengths, with the cases that make PD interesting."""

from __future__ import annotations

from pathlib import Path

import attrs

__all__ = ["Chat", "demo_chats"]

_LICENSE = Path(__file__).parents[2] / "LICENSE"

_HANDBOOK = """\
You are the assistant of a small public library. Answer in two or three plain sentences. These \
are the rules of the house, and you know them by heart. The reading room opens at nine in the \
morning and closes at eight in the evening, on Saturdays at five, and on Sundays it stays \
closed. A reader's card costs nothing and is valid for two years; children need the signature \
of a parent. Up to ten books may be borrowed at once, for four weeks; a book that nobody else \
has asked for may be kept for another four weeks. Whoever returns a book late pays ten cents a \
day, but never more than the book is worth. Newspapers, maps and books printed before 1900 \
stay in the reading room, where the staff bring them to your table. Food stays outside; water \
in a closed bottle is welcome. Telephones are silent. The children's room has a story hour \
every Wednesday at four, and no one needs to sign up for it. Groups of up to six may book the \
small study on the second floor for two hours. The printer by the stairs takes coins, and the \
first five pages of a day are free. A lost card is replaced at the desk at once. Questions \
that the desk cannot answer go to the archive, which replies by post within a week."""


@attrs.frozen(kw_only=True)
class Chat:
    """One conversation to be continued.

    Args:
        request_id: its name in the table and in the timeline.
        messages: role and content, as a chat template takes them.
        is_late: sent only once others are being answered.
    """

    request_id: str
    messages: tuple[dict[str, str], ...]
    is_late: bool = False


def demo_chats() -> tuple[Chat, ...]:
    """The chats of the demo, in the order in which they are sent.

    ``license`` is longer than a prefill chunk; the two ``library`` chats share a long system
    prompt; ``late`` arrives while others decode.
    """
    clauses = " ".join(_LICENSE.read_text(encoding="utf-8").split())[:2800]
    return (
        _chat("sky", "Why is the sky blue?"),
        _chat("haiku", "Write a haiku about a slow train in winter."),
        _chat("library-1", "How long may I keep a book?", system=_HANDBOOK),
        _chat("license", f"What does this license allow me to do?\n\n{clauses}"),
        _chat("library-2", "May I bring my lunch into the reading room?", system=_HANDBOOK),
        _chat("primes", "List the first ten prime numbers and say what makes a number prime."),
        _chat("python", "Explain what a Python generator is and show a short example."),
        _chat("tea", "Give me three steps for a good cup of tea."),
        _chat("moon", "Tell me a story about a lighthouse keeper who befriends the moon."),
        _chat("late", "In one sentence: what is a lease in a distributed system?", is_late=True),
    )


def _chat(
    request_id: str, question: str, *, system: str | None = None, is_late: bool = False
) -> Chat:
    messages = [{"role": "user", "content": question}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Chat(request_id=request_id, messages=tuple(messages), is_late=is_late)
