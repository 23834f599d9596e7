"""Making a trace on which two engines part as small as it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from scheduler_traces import Abort, Arrival, Trace

__all__ = ["shrink"]


def shrink(trace: Trace, still_fails: Callable[[Trace], bool], *, max_tries: int = 2000) -> Trace:
    """Drop and simplify what is not needed, as long as the trace fails.

    Args:
        trace: a trace that fails.
        still_fails: whether a smaller one does too; must not raise.
        max_tries: how often to ask.
    """
    tries = 0
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(trace):
            tries += 1
            if tries > max_tries:
                return trace
            if still_fails(smaller):
                trace, progress = smaller, True
                break
    return trace


def _smaller(trace: Trace) -> Iterator[Trace]:
    """Simpler traces, the boldest steps first."""
    count = len(trace.arrivals)
    size = count // 2
    while size:
        for start in range(0, count, size):
            yield _without(trace, set(range(start, min(start + size, count))))
        size //= 2
    for place in range(len(trace.aborts)):
        yield replace(trace, aborts=(*trace.aborts[:place], *trace.aborts[place + 1 :]))
    for request, arrival in enumerate(trace.arrivals):
        for simpler in _simpler(arrival):
            arrivals = (*trace.arrivals[:request], simpler, *trace.arrivals[request + 1 :])
            yield replace(trace, arrivals=arrivals)
    for name in ("enable_prefix_caching", "long_prefill_token_threshold", "policy"):
        default = {"policy": "fcfs"}.get(name, 0)
        if getattr(trace.settings, name) != default:
            value = False if name == "enable_prefix_caching" else default
            yield replace(trace, settings=replace(trace.settings, **{name: value}))


def _without(trace: Trace, dropped: set[int]) -> Trace:
    kept = [request for request in range(len(trace.arrivals)) if request not in dropped]
    index = {request: place for place, request in enumerate(kept)}
    return replace(
        trace,
        arrivals=tuple(trace.arrivals[request] for request in kept),
        aborts=tuple(
            Abort(abort.step, index[abort.request], abort.is_between)
            for abort in trace.aborts
            if abort.request in index
        ),
    )


def _simpler(arrival: Arrival) -> Iterator[Arrival]:
    defaults = {
        "step": arrival.step - 1 if arrival.step else 0,
        "min_tokens": 0,
        "stop_token_ids": (),
        "ignore_eos": True,
        "priority": 0,
        "cache_salt": None,
    }
    if arrival.step > 1:
        yield replace(arrival, step=0)
        yield replace(arrival, step=arrival.step // 2)
    for name, value in defaults.items():
        if getattr(arrival, name) != value:
            yield replace(arrival, **{name: value})
    for tokens in (arrival.max_tokens // 2, arrival.max_tokens - 1):
        if tokens:
            yield replace(arrival, max_tokens=tokens, min_tokens=min(arrival.min_tokens, tokens))
    for place, (stream, length) in enumerate(arrival.prompt):
        for shorter in {0, length // 2, length - 1}:
            run = ((stream, shorter),) if shorter else ()
            prompt = (*arrival.prompt[:place], *run, *arrival.prompt[place + 1 :])
            if prompt:
                yield replace(arrival, prompt=prompt)
