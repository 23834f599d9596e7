"""Structured output: what the scheduler needs of a grammar library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from pdcore.request import Request

__all__ = ["GrammarBackend", "GrammarMatcher"]


class GrammarMatcher(ABC):
    """One request's place in its grammar."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Take the next token; return False when the grammar does not allow it.

        Called once for every token that the request is given, the one that ends it included: where
        an end-of-sequence token may come, `fill_bitmask` allows it, and so does this. After False
        it is not called again.
        """

    @abstractmethod
    def fill_bitmask(self, bits: npt.NDArray[np.int32]) -> None:
        """Set the bits of the tokens allowed next: bit ``t % 32`` of word ``t // 32``.

        Args:
            bits: int32 (ceil(vocab / 32),), all zero on entry.
        """


class GrammarBackend(ABC):
    """Compiles ``SamplingParams.structured_output`` in the background."""

    vocab_size: int

    @abstractmethod
    def compile(self, request: Request) -> Future[GrammarMatcher]:
        """Start compiling; must not block. The future's exception ends that request alone."""
