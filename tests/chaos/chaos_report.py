"""What a run comes to, for people."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping

import attrs
from chaos_messages import Counts, EngineSettings
from protections import PROTECTIONS
from verdict import Finding, Life

__all__ = ["Report"]

_NUM_FINDINGS_SHOWN = 8
_WIDTH = 18
_LINE = 110


@attrs.frozen(kw_only=True)
class Report:
    """A run.

    Args:
        seed, num_requests: of its plan.
        without: the protection that was switched off, or empty.
        lives: what became of each request.
        faults: how many of each kind were injected.
        counts: what the engines counted.
        findings: what must not be.
        misreads: foreign KV that a row read.
        wall_s: how long it took.
        engines: how they were built.
    """

    seed: int
    num_requests: int
    without: str
    lives: tuple[Life, ...]
    faults: Counter[str]
    counts: Counts
    findings: tuple[Finding, ...]
    misreads: tuple[str, ...]
    wall_s: float
    engines: tuple[EngineSettings, ...]

    @property
    def is_caught(self) -> bool:
        """Whether what shows is what the missing protection should let through."""
        signs = PROTECTIONS[self.without].signs if self.without else ()
        return any(finding.kind in signs for finding in self.findings)

    @property
    def is_as_it_should_be(self) -> bool:
        """Nothing found; with a protection off, its absence found."""
        return self.is_caught if self.without else not self.findings

    def text(self) -> str:
        """The report as a table."""
        lines = [
            f"chaos, seed {self.seed}: 2 prefill and 2 decode engines over NIXL"
            + (f", without {self.without}" if self.without else "")
        ]
        for name, words in self._rows():
            lines += _row(name, words)
        lines += [f"  {line}" for line in self._verdict()]
        return "\n".join(lines)

    def _rows(self) -> Iterable[tuple[str, str]]:
        counts = self.counts
        for engine in self.engines:
            yield f"engine {engine.name}", _describe(engine)
        limits = attrs.asdict(self.engines[0].timeouts).items()
        yield "limits", ", ".join(f"{name.removesuffix('_s')} {s:g} s" for name, s in limits)
        outcomes = Counter(life.outcome or "not ended" for life in self.lives)
        yield "requests", f"{len(self.lives)}: {_pairs(outcomes)}"
        causes = Counter(_short(life.cause) for life in self.lives if life.outcome == "error")
        for cause, number in causes.most_common():
            yield "an error because", f"{number}: {cause}"
        yield "begun anew", f"{sum(life.num_tries > 1 for life in self.lives)} requests"
        yield "faults injected", _pairs(self.faults)
        yield "tokens checked", f"{sum(len(life.token_ids) for life in self.lives)}"
        yield (
            "loads",
            f"{counts.num_loads} begun, {counts.num_transfers} transferred and vouched for, "
            f"{counts.num_bytes / 1e6:.2f} MB",
        )
        yield (
            "loads gone wrong",
            f"{counts.num_failed_loads}; {counts.num_recomputed_tokens} tokens recomputed",
        )
        yield (
            "tickets",
            f"{counts.num_accepted} accepted, {counts.num_rejected} rejected, "
            f"{counts.num_released} given back, {counts.num_expired} leases expired",
        )
        yield (
            "pushes",
            f"{counts.num_expected} expected, {counts.num_declined} declined for want of room; "
            f"{counts.num_pushes} begun, {counts.num_refused_pushes} refused, "
            f"{counts.num_push_restarts} begun anew, {counts.num_landed} vouched for, "
            f"{counts.num_used} loaded",
        )
        pushed = [life for life in self.lives if life.num_pushed_blocks]
        yield (
            "ran on pushed KV",
            f"{len(pushed)} requests, {sum(life.num_pushed_blocks for life in pushed)} blocks; "
            f"{sum(len(life.token_ids) for life in pushed)} of their tokens checked",
        )
        yield "quarantines", f"{counts.num_quarantines}"
        yield "events", f"{counts.num_duplicates} duplicates, {counts.num_late_events} late"
        yield (
            "steps failed",
            f"{counts.num_failed_steps}; {counts.num_preemptions} preemptions",
        )
        yield "wall time", f"{self.wall_s:.1f} s"

    def _verdict(self) -> Iterable[str]:
        for finding in self.findings[:_NUM_FINDINGS_SHOWN]:
            yield f"{finding.kind.upper()}: {finding.words}"
        if len(self.findings) > _NUM_FINDINGS_SHOWN:
            yield f"... and {len(self.findings) - _NUM_FINDINGS_SHOWN} more"
        if self.misreads:
            yield f"{len(self.misreads)} reads of foreign KV, the first: {self.misreads[0]}"
        again = f"make chaos SEED={self.seed} REQUESTS={self.num_requests}"
        if self.without:
            again += f" ARGS=--without={self.without}"
            what = PROTECTIONS[self.without].what
            caught = "caught" if self.is_caught else "NOT CAUGHT"
            yield f"verdict: {caught}. Switched off: {what}. Again: {again}"
        elif self.findings:
            yield f"verdict: FAILED. Again: {again}"
        else:
            yield (
                "verdict: every request has the tokens of its solo run or a true reason; "
                "no hang; every engine at rest with all its blocks"
            )


def _row(name: str, words: str) -> list[str]:
    lines = textwrap.wrap(words, _LINE - _WIDTH - 3) or ["none"]
    return [f"  {name:{_WIDTH}} {lines[0]}"] + [f"  {'':{_WIDTH}} {line}" for line in lines[1:]]


def _describe(engine: EngineSettings) -> str:
    return (
        f"{engine.num_blocks - 1} blocks of {engine.block_size}, batch queue of {engine.depth}, "
        f"{engine.on_load_failure} after {engine.max_load_retries} retries"
        + (f", {engine.num_push_slots} slots for pushes" if engine.num_push_slots else "")
    )


def _pairs(values: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {name}" for name, value in sorted(values.items()))


def _short(cause: str) -> str:
    """A cause without what differs from request to request."""
    words = cause.removeprefix("remote KV could not be loaded: ")
    return re.sub(r"\S*\d\S*", "_", words)
