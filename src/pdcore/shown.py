"""Values in messages to people, whatever somebody passed."""

from __future__ import annotations

__all__ = ["shown"]


def shown(value: object) -> str:
    """The start of a value's `repr`, 80 characters at most; its type where that fails.

    Never raises: what is refused may be nested too deep to be written out, or have a `repr` of its
    own.
    """
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"<{type(value).__name__}>"
