"""Grammars for tests: some that compile at once, and some that the test compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from pdcore.request import Request
from pdcore.scheduler import GrammarBackend, GrammarMatcher

_Matcher = TypeVar("_Matcher", bound=GrammarMatcher)


class AnyToken(GrammarMatcher):
    """Allows everything."""

    def accept(self, token_id: int) -> bool:
        return True

    def fill_bitmask(self, bits: npt.NDArray[np.int32]) -> None:
        bits[:] = -1


class Text(GrammarMatcher):
    """Allows exactly the tokens of a text, one after the other.

    Attributes:
        tokens: what it was told.
        masked_after: how many tokens it had been told when it made each mask.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.masked_after: list[int] = []
        self._text = text

    def accept(self, token_id: int) -> bool:
        self.tokens.append(token_id)
        return self.tokens == list(self._text[: len(self.tokens)])

    def fill_bitmask(self, bits: npt.NDArray[np.int32]) -> None:
        self.masked_after.append(len(self.tokens))
        token = self._text[len(self.tokens)]
        bits[token // 32] = np.array(1 << token % 32, np.uint32).view(np.int32)


class CompilesAtOnce(GrammarBackend, Generic[_Matcher]):
    """Has a matcher for every request at once.

    Args:
        make_matcher: makes one for a request; an exception of it is one of `compile`.
        vocab_size: of the model.

    Attributes:
        matchers: what was made, by request id.
    """

    def __init__(
        self, make_matcher: Callable[[Request], _Matcher], *, vocab_size: int = 32_000
    ) -> None:
        self.vocab_size = vocab_size
        self.matchers: dict[str, _Matcher] = {}
        self._make_matcher = make_matcher

    def compile(self, request: Request) -> Future[GrammarMatcher]:
        future: Future[GrammarMatcher] = Future()
        matcher = self.matchers[request.request_id] = self._make_matcher(request)
        future.set_result(matcher)
        return future


class CompilesLater(GrammarBackend):
    """Hands out one future for each request, for the test to fill.

    Args:
        vocab_size: of the model.

    Attributes:
        futures: by request id.
    """

    def __init__(self, *, vocab_size: int = 32_000) -> None:
        self.vocab_size = vocab_size
        self.futures: dict[str, Future[GrammarMatcher]] = {}

    def compile(self, request: Request) -> Future[GrammarMatcher]:
        future = self.futures[request.request_id] = Future()
        return future


def text_of(request: Request) -> Text:
    """The text that a request's ``structured_output`` is."""
    return Text(request.sampling.structured_output)
