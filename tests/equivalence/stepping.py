"""Driving an engine through a trace, and what is written down on the way.

The same steps in the same order for every engine: what differs between two records of one trace
is then a decision of the engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any

from scheduler_traces import Abort, Arrival, Trace

__all__ = ["Engine", "Plan", "Record", "Result", "Step", "drive", "first_difference"]

_MAX_STEPS = 4000


@dataclass(frozen=True)
class Plan:
    """What an engine decided in one step. Requests are named by their index in the trace.

    Args:
        scheduled: (request, tokens), in the order in which they run.
        new, resumed: (request, tokens found in the prefix cache), in order of admission.
        preempted: sorted.
        draws: (request, position of the token that is drawn) for those that draw one.
        withdrawn: whether a request that gave way had filled a block in this very step.
    """

    scheduled: list[list[int]]
    new: list[list[int]]
    resumed: list[list[int]]
    preempted: list[int]
    draws: list[tuple[int, int]]
    withdrawn: bool = False


@dataclass(frozen=True)
class Result:
    """What an engine told its application after one step.

    Args:
        produced: requests that got a token, sorted.
        finished: (request, reason) of those that ended by themselves, sorted.
    """

    produced: list[int]
    finished: list[list[Any]]


class Engine(ABC):
    """A scheduler under test with all that it needs around it."""

    @abstractmethod
    def add(self, request: int) -> None:
        """Add a request of the trace."""

    @abstractmethod
    def abort(self, request: int) -> None:
        """End a request that is not finished."""

    @abstractmethod
    def schedule(self) -> Plan:
        """Plan one step."""

    @abstractmethod
    def update(self) -> Result:
        """Take in the result of the oldest plan, with the tokens that the trace has for it."""

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that nobody uses, cached ones included."""


@dataclass
class Step:
    """One line of a record; what is empty is left out of files."""

    scheduled: list[list[int]] = field(default_factory=list)
    new: list[list[int]] = field(default_factory=list)
    resumed: list[list[int]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    num_free_planned: int | None = None
    produced: list[int] = field(default_factory=list)
    finished: list[list[Any]] = field(default_factory=list)
    num_free_after: int | None = None


@dataclass
class Record:
    """The decisions of one engine over one trace.

    Args:
        steps: one for each step of the trace, also for those in which nothing happens.
        deviation: which of the allowed deviations ended the comparison, or None.
        deviant: the request that it is about, where there is one.
    """

    steps: list[Step] = field(default_factory=list)
    deviation: str | None = None
    deviant: int | None = None

    def to_data(self) -> dict[str, Any]:
        """Plain lists and dictionaries."""
        steps = [
            {name: value for name, value in asdict(step).items() if value not in (None, [])}
            for step in self.steps
        ]
        return {"steps": steps, "deviation": self.deviation, "deviant": self.deviant}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Record:
        """The reverse of `to_data`."""
        steps = [Step(**step) for step in data["steps"]]
        return cls(steps, data["deviation"], data["deviant"])


class _Drive:
    """One engine on its way through one trace."""

    def __init__(self, trace: Trace, engine: Engine) -> None:
        self.trace = trace
        self.engine = engine
        self.record = Record()
        self.num_tokens: dict[int, int] = {}
        self.num_in_flight = 0
        self.arrivals: dict[int, list[int]] = {}
        self.aborts: dict[tuple[int, bool], list[Abort]] = {}
        for request, arrival in enumerate(trace.arrivals):
            self.arrivals.setdefault(arrival.step, []).append(request)
        for abort in trace.aborts:
            self.aborts.setdefault((abort.step, abort.is_between), []).append(abort)

    def run(self, max_steps: int | None) -> Record:
        last_arrival = max((arrival.step for arrival in self.trace.arrivals), default=0)
        for number in range(_MAX_STEPS):
            if number == max_steps or self.record.deviation:
                return self.record
            if number > last_arrival and not self.num_tokens and not self.num_in_flight:
                return self.record
            self._step(number)
        raise RuntimeError(f"trace {self.trace.name} does not end within {_MAX_STEPS} steps")

    def _step(self, number: int) -> None:
        step = Step()
        for request in self.arrivals.get(number, ()):
            deviation = self._refusal(self.trace.arrivals[request])
            if deviation is not None:
                self.record.deviation, self.record.deviant = deviation, request
                return
            self.engine.add(request)
            self.num_tokens[request] = self.trace.arrivals[request].num_prompt_tokens
        self.record.steps.append(step)
        self._abort(number, is_between=False)
        is_idle = not self.num_tokens
        if not is_idle:
            self._plan(step)
            if self.record.deviation == "a":
                return
        self._abort(number, is_between=True)
        is_full = self.num_in_flight == self.trace.settings.num_in_flight
        if self.num_in_flight and (is_idle or is_full):
            self._take_in(step)

    def _plan(self, step: Step) -> None:
        plan = self.engine.schedule()
        step.scheduled, step.preempted = plan.scheduled, plan.preempted
        step.new, step.resumed = plan.new, plan.resumed
        step.num_free_planned = self.engine.num_free_blocks
        self.num_in_flight += 1
        for request, position in plan.draws:
            if self._outgrows(request, position):
                self.record.deviation, self.record.deviant = "a", request
                return
        if plan.withdrawn:
            self.record.deviation = "c"

    def _take_in(self, step: Step) -> None:
        result = self.engine.update()
        self.num_in_flight -= 1
        step.produced, step.finished = result.produced, result.finished
        step.num_free_after = self.engine.num_free_blocks
        for request in result.produced:
            self.num_tokens[request] += 1
        for request, _ in result.finished:
            del self.num_tokens[request]

    def _abort(self, number: int, *, is_between: bool) -> None:
        for abort in self.aborts.get((number, is_between), ()):
            if self.num_tokens.pop(abort.request, None) is not None:
                self.engine.abort(abort.request)

    def _refusal(self, arrival: Arrival) -> str | None:
        """The deviation by which a request is refused at the door, instead of waiting for ever."""
        settings, num_prompt_tokens = self.trace.settings, arrival.num_prompt_tokens
        if num_prompt_tokens > settings.capacity_tokens:
            return "a"
        is_whole = not settings.enable_chunked_prefill
        if is_whole and num_prompt_tokens > settings.max_num_batched_tokens:
            return "b"
        return None

    def _outgrows(self, request: int, position: int) -> bool:
        """Whether a request now draws the last token that the pool allows it, and wants more."""
        capacity = self.trace.settings.capacity_tokens
        return position >= capacity and capacity + 1 < self.trace.limit(request)


def drive(trace: Trace, engine: Engine, *, max_steps: int | None = None) -> Record:
    """Take an engine through a trace and write down what it decides.

    In each step requests arrive, aborts happen, a plan is made if anybody is left, more aborts
    happen, and the oldest result is taken in once enough plans are in flight. The record ends where
    the trace does, or where one of the allowed deviations sets in:

    - ``a``: a request that the pool can never hold arrives, or one draws the last token that the
      pool can hold for it and wants more.
    - ``b``: prompts are not chunked, and one is longer than a step.
    - ``c``: a request gives way after its plan of the same step has filled a block; this step
      still counts.

    Args:
        max_steps: stop after so many steps; None goes to the end.
    """
    return _Drive(trace, engine).run(max_steps)


def first_difference(expected: Record, actual: Record) -> str | None:
    """In words, where two records part; None when they are the same."""
    for number, (wanted, got) in enumerate(zip(expected.steps, actual.steps, strict=False)):
        if wanted == got:
            continue
        for name, value in vars(wanted).items():
            if value != getattr(got, name):
                return f"step {number}, {name}: expected {value}, got {getattr(got, name)}"
    if len(expected.steps) != len(actual.steps):
        return f"expected {len(expected.steps)} steps, got {len(actual.steps)}"
    return None
