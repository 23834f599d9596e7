"""Random traces of several kinds, each made to lean on something else.

A trace follows from its kind and seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from scheduler_traces import Abort, Arrival, Settings, Trace

__all__ = ["PROFILES", "random_trace"]


def random_trace(profile: str, seed: int) -> Trace:
    """One trace of a kind."""
    rng = random.Random(f"{profile} {seed}")
    workload = PROFILES[profile](rng)
    return workload.trace(f"{profile}-{seed}")


class _Workload:
    """Draws arrivals and aborts. The attributes are ranges that the profiles narrow or widen.

    Args:
        rng: where all choices come from.
        settings: the scheduler's.
    """

    def __init__(self, rng: random.Random, settings: Settings) -> None:
        self.rng = rng
        self.settings = settings
        self.num_requests = rng.randint(8, 28)
        self.num_prefixes = rng.randint(1, 4)
        self.prefix_tokens = (0, 3 * settings.block_size + 2)
        self.suffix_tokens = (1, 2 * settings.block_size + 3)
        self.max_tokens = (1, 24)
        self.steps_between = rng.choice([0, 1, 2, 4])
        self.num_priorities = 1
        self.same_arrival_time = 0.1
        self.repeats = 0.15
        self.follow_ups = 0.15
        self.is_aligned = 0.2
        self.stop_ids = 0.3
        self.min_tokens = 0.2
        self.ignore_eos = 0.3
        self.salts = 0.05
        self.aborts = 0.0
        self.allows_oversize = False

    def trace(self, name: str) -> Trace:
        arrivals: list[Arrival] = []
        step, time = 0, 0.0
        for _ in range(self.num_requests):
            step += self._geometric(self.steps_between)
            if self.rng.random() > self.same_arrival_time:
                time += self.rng.choice([0.25, 1.0])
            arrivals.append(self._arrival(arrivals, step, time))
        return Trace(name, self.settings, tuple(arrivals), tuple(self._aborts(arrivals)))

    def _arrival(self, earlier: list[Arrival], step: int, time: float) -> Arrival:
        rng = self.rng
        prompt, stream = self._prompt(earlier), 1000 + len(earlier)
        if earlier and rng.random() < self.repeats:
            # The same prompt and the same output, often at the same time.
            other = rng.choice(earlier[-3:])
            prompt, stream = other.prompt, other.stream
        max_tokens = rng.randint(*self.max_tokens)
        if not self.allows_oversize:
            prompt = _cut(prompt, self.settings.capacity_tokens - max_tokens)
        prompt = _cut(prompt, self.settings.max_model_len - 1)
        takes = rng.random() < self.min_tokens
        return Arrival(
            step=step,
            prompt=prompt,
            stream=stream,
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens) if takes else 0,
            stop_token_ids=(1, 2) if rng.random() < self.stop_ids else (),
            ignore_eos=rng.random() < self.ignore_eos,
            priority=rng.randrange(self.num_priorities),
            arrival_time=time,
            cache_salt="other" if rng.random() < self.salts else None,
        )

    def _prompt(self, earlier: list[Arrival]) -> tuple[tuple[int, int], ...]:
        rng, block_size = self.rng, self.settings.block_size
        prefix, suffix = rng.randint(*self.prefix_tokens), rng.randint(*self.suffix_tokens)
        if rng.random() < self.is_aligned:
            prefix -= prefix % block_size
            suffix += -(prefix + suffix) % block_size
        runs = ((rng.randrange(self.num_prefixes), prefix),)
        if earlier and rng.random() < self.follow_ups:
            # The next turn of a conversation: the prompt and output of another, and some more.
            other = rng.choice(earlier)
            runs = (*other.prompt, (other.stream, rng.randint(1, other.max_tokens)))
        return (*(run for run in runs if run[1]), (100 + rng.randrange(1000), suffix))

    def _aborts(self, arrivals: list[Arrival]) -> list[Abort]:
        aborts = []
        for request, arrival in enumerate(arrivals):
            if self.rng.random() < self.aborts:
                step = arrival.step + self._geometric(8)
                aborts.append(Abort(step, request, self.rng.random() < 0.5))
        return aborts

    def _geometric(self, mean: int) -> int:
        return int(self.rng.expovariate(1 / mean)) if mean else 0


def _cut(prompt: tuple[tuple[int, int], ...], most: int) -> tuple[tuple[int, int], ...]:
    """The first ``most`` tokens of a prompt, at least one."""
    kept: list[tuple[int, int]] = []
    room = max(most, 1)
    for stream, length in prompt:
        if room > 0:
            kept.append((stream, min(length, room)))
            room -= length
    return tuple(kept)


def _plain(rng: random.Random) -> _Workload:
    """A bit of everything, with room."""
    max_num_seqs = rng.randint(2, 8)
    settings = Settings(
        block_size=rng.choice([1, 2, 3, 4, 8, 16]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, rng.choice([8, 16, 32, 64])),
        max_model_len=rng.choice([32, 64, 128]),
        vocab_size=rng.choice([20, 50, 200]),
        enable_prefix_caching=rng.random() < 0.85,
    )
    # A small pool for blocks of its size: half of what the running requests could come to.
    tokens = max_num_seqs * rng.randint(16, 48)
    return _Workload(rng, replace(settings, num_blocks=2 + tokens // settings.block_size))


def _uncached(rng: random.Random) -> _Workload:
    """No prefix caching."""
    workload = _plain(rng)
    workload.settings = replace(workload.settings, enable_prefix_caching=False)
    return _squeezed(workload) if rng.random() < 0.5 else workload


def _pressure(rng: random.Random) -> _Workload:
    """A pool that is far too small: many preemptions."""
    return _squeezed(_plain(rng))


def _squeezed(workload: _Workload) -> _Workload:
    rng, block_size = workload.rng, workload.settings.block_size
    num_tokens = rng.randint(24, 56)
    workload.settings = replace(workload.settings, num_blocks=2 + num_tokens // block_size)
    workload.num_requests = rng.randint(8, 18)
    workload.max_tokens = (4, 20)
    workload.steps_between = rng.choice([0, 1, 2])
    return workload


def _eviction(rng: random.Random) -> _Workload:
    """Long runs over few prefixes in a pool that cannot keep them all: the order of eviction."""
    workload = _plain(rng)
    block_size = rng.choice([1, 2, 4])
    workload.settings = replace(
        workload.settings, block_size=block_size, enable_prefix_caching=True
    )
    workload.settings = replace(workload.settings, num_blocks=2 + rng.randint(40, 90) // block_size)
    workload.num_requests = 40
    workload.num_prefixes = 6
    workload.prefix_tokens = (2 * block_size, 24)
    workload.suffix_tokens = (1, 6)
    workload.max_tokens = (1, 8)
    workload.follow_ups = 0.3
    workload.steps_between = 1
    return workload


def _chunked(rng: random.Random) -> _Workload:
    """Long prompts, small steps and a cap on the chunks."""
    workload = _plain(rng)
    max_num_seqs = rng.randint(1, 4)
    workload.settings = replace(
        workload.settings,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.randint(max_num_seqs, 12),
        long_prefill_token_threshold=rng.choice([0, 1, 2, 3, 5]),
        num_blocks=2 + rng.randint(60, 120) // workload.settings.block_size,
    )
    workload.num_requests = rng.randint(6, 14)
    workload.prefix_tokens = (0, 30)
    workload.suffix_tokens = (1, 30)
    workload.max_tokens = (1, 8)
    return workload


def _whole(rng: random.Random) -> _Workload:
    """Prompts are not chunked."""
    workload = _plain(rng)
    length = rng.choice([32, 64])
    workload.settings = replace(
        workload.settings,
        enable_chunked_prefill=False,
        max_model_len=length,
        max_num_batched_tokens=length + rng.randint(0, 16),
        long_prefill_token_threshold=rng.choice([0, 0, 6]),
    )
    return workload


def _whole_narrow(rng: random.Random) -> _Workload:
    """Prompts are not chunked, and some are longer than a step."""
    workload = _whole(rng)
    # Room for all: one that is preempted may not fit a step either, and nobody could ever go on.
    workload.settings = replace(
        workload.settings, max_num_batched_tokens=rng.randint(16, 20), num_blocks=400
    )
    workload.prefix_tokens, workload.suffix_tokens = (0, 4), (1, 15)
    workload.max_tokens = (1, 3)
    workload.follow_ups = 0.0
    return workload


def _narrow(rng: random.Random) -> _Workload:
    """Few rows, which change hands often."""
    workload = _plain(rng)
    workload.settings = replace(workload.settings, max_num_seqs=rng.randint(1, 3))
    workload.num_requests = 30
    workload.steps_between = rng.choice([0, 1])
    workload.max_tokens = (1, 6)
    return workload


def _together(rng: random.Random) -> _Workload:
    """Groups that arrive together, many with the same prompt, and end together."""
    workload = _plain(rng)
    workload.steps_between = 0
    workload.repeats = 0.5
    workload.is_aligned = 0.6
    workload.max_tokens = (3, 4)
    workload.suffix_tokens = (1, workload.settings.block_size)
    workload.num_requests = 30
    return workload


def _stops(rng: random.Random) -> _Workload:
    """Most requests end by a stop token."""
    workload = _plain(rng)
    workload.settings = replace(workload.settings, vocab_size=rng.choice([8, 12]))
    workload.stop_ids, workload.ignore_eos, workload.min_tokens = 0.7, 0.2, 0.5
    workload.max_tokens = (4, 40)
    return workload


def _aborted(rng: random.Random) -> _Workload:
    """Half of the requests are aborted, before steps and within them."""
    workload = _squeezed(_plain(rng)) if rng.random() < 0.5 else _plain(rng)
    workload.aborts = 0.5
    workload.max_tokens = (4, 30)
    return workload


def _priority(rng: random.Random) -> _Workload:
    """Priorities, with and without pressure, with many ties."""
    workload = rng.choice([_plain, _pressure, _narrow, _aborted, _uncached])(rng)
    workload.settings = replace(workload.settings, policy="priority")
    workload.num_priorities = rng.randint(2, 4)
    workload.same_arrival_time = rng.choice([0.0, 0.3, 0.8])
    return workload


def _yielding(rng: random.Random) -> _Workload:
    """Priorities in a pool that is far too small: whoever runs gives way to whoever matters."""
    workload = _pressure(rng)
    workload.settings = replace(workload.settings, policy="priority", max_num_seqs=8)
    workload.num_priorities = rng.randint(2, 8)
    workload.follow_ups, workload.max_tokens = 0.05, (6, 24)
    return workload


def _refunded(rng: random.Random) -> _Workload:
    """Small steps shared by several prompts, so that what a victim gives back is used at once."""
    workload = _plain(rng)
    max_num_seqs = rng.randint(4, 6)
    block_size = rng.choice([1, 2, 3])
    workload.settings = replace(
        workload.settings,
        block_size=block_size,
        num_blocks=2 + rng.randint(30, 50) // block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.randint(0, 3),
        max_model_len=64,
        long_prefill_token_threshold=rng.randint(2, 4),
        enable_prefix_caching=rng.random() < 0.3,
        policy="priority",
    )
    workload.num_requests, workload.steps_between = 9, 1
    workload.num_priorities = 8
    workload.prefix_tokens, workload.suffix_tokens = (0, 6), (8, 18)
    workload.max_tokens = (4, 16)
    return workload


def _crowd(rng: random.Random) -> _Workload:
    """Many rows at once, ends and arrivals in most steps, and not quite enough blocks."""
    workload = _plain(rng)
    block_size = rng.choice([2, 4, 8])
    workload.settings = replace(
        workload.settings,
        block_size=block_size,
        max_num_seqs=24,
        max_num_batched_tokens=rng.choice([48, 128]),
        num_blocks=2 + rng.randint(300, 600) // block_size,
        policy=rng.choice(["fcfs", "fcfs", "priority"]),
    )
    workload.num_requests, workload.steps_between = 60, 0
    workload.num_priorities = 3
    workload.max_tokens = (1, 30)
    workload.aborts = 0.05
    return workload


def _oversize(rng: random.Random) -> _Workload:
    """Some requests ask for more than the pool can ever hold."""
    workload = _pressure(rng)
    workload.settings = replace(
        workload.settings, num_blocks=2 + 20 // workload.settings.block_size
    )
    workload.allows_oversize = True
    workload.num_requests = 12
    workload.steps_between = 4
    return workload


def _mixed(rng: random.Random) -> _Workload:
    """Everything at once."""
    kinds = [_plain, _pressure, _eviction, _chunked, _whole, _narrow, _together, _stops, _aborted]
    workload = rng.choice(kinds)(rng)
    workload.aborts = rng.choice([0.0, 0.3])
    workload.num_priorities = rng.choice([1, 3])
    workload.settings = replace(
        workload.settings,
        policy=rng.choice(["fcfs", "priority"]),
        enable_prefix_caching=rng.random() < 0.8,
        long_prefill_token_threshold=rng.choice([0, 0, 2, 4, 7]),
    )
    return workload


def _in_flight(kind: Callable[[random.Random], _Workload]) -> Callable[[random.Random], _Workload]:
    """The same with two plans in flight."""

    def make(rng: random.Random) -> _Workload:
        workload = kind(rng)
        workload.settings = replace(workload.settings, num_in_flight=2)
        return workload

    return make


_KINDS: dict[str, Callable[[random.Random], _Workload]] = {
    "plain": _plain,
    "uncached": _uncached,
    "pressure": _pressure,
    "eviction": _eviction,
    "chunked": _chunked,
    "whole": _whole,
    "whole-narrow": _whole_narrow,
    "narrow": _narrow,
    "together": _together,
    "stops": _stops,
    "aborted": _aborted,
    "priority": _priority,
    "yielding": _yielding,
    "refunded": _refunded,
    "crowd": _crowd,
    "oversize": _oversize,
    "mixed": _mixed,
}

PROFILES: dict[str, Callable[[random.Random], _Workload]] = {
    **_KINDS,
    **{f"async-{name}": _in_flight(kind) for name, kind in _KINDS.items()},
}
