"""One step at a time against several plans under way: what `pdcore.loop.BatchQueue` is for.

A step takes the device a while, and then the application: it turns tokens into text and sends them.
One step at a time, each waits for the other. With two plans under way the device runs one while the
application is busy with the result before it and the scheduler plans the one after it.

The device here is a stand-in that takes --device-ms for a step, the application one that takes
--app-ms; scheduler, block pool and executor are real. With --model a real model takes the device's
place. Prints a table and draws OUT/rhythm.png (with matplotlib, from pdcore[demo]). The exit status
is 0 only when every run gave the same tokens.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from pdcore import KVCacheManager, Limits, LRUBlockPool, Request, SamplingParams, UnifiedScheduler
from pdcore.errors import PdcoreError
from pdcore.kvcache import KVCacheConfig, KVCacheSpec
from pdcore.loop import BatchQueue, step
from pdcore.messages import GrammarBitmask, ModelRunnerOutput, SchedulerOutput, StepResult
from pdcore.runner.base import ModelRunner
from pdcore.runner.executor import InProcessExecutor
from pdcore.testing import FakeKVRunner
from pdcore.trace import Span, Trace, Tracer

if TYPE_CHECKING:
    from pd.lanes import Bar

NUM_BLOCKS, BLOCK_SIZE = 256, 16
DEPTHS = (0, 2, 3)  # 0 stands for `step`
_COLOURS = ("#3b6fb6", "#e08a1e")  # of odd and even steps
_NUM_STEPS_SHOWN = 6


@attrs.frozen(kw_only=True)
class Outcome:
    """One run: how deep the pipe was, what it produced, how long it took, and when what ran."""

    depth: int
    tokens: dict[str, list[int]]
    num_steps: int
    seconds: float
    trace: Trace

    @property
    def name(self) -> str:
        return f"BatchQueue, depth {self.depth}" if self.depth else "step()"

    @property
    def idle_share(self) -> float:
        """How much of the time between its first and its last step the device did nothing."""
        spans = [span for span in self.trace.spans if span.lane == "device"]
        return 1 - sum(s.duration_s for s in spans) / (spans[-1].end - spans[0].start)


class TracedScheduler(UnifiedScheduler):
    """Records when it plans and when it takes in a result."""

    def __init__(self, tracer: Tracer, limits: Limits) -> None:
        super().__init__(KVCacheManager(LRUBlockPool(NUM_BLOCKS, BLOCK_SIZE)), limits=limits)
        self._tracer = tracer

    def schedule(self) -> SchedulerOutput:
        start = self._tracer.clock.now()
        output = super().schedule()
        self._tracer.add_span("engine", "plan", start, self.clock.now(), step_id=output.step_id)
        return output

    def update_from_output(
        self, output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> StepResult:
        with self._tracer.span("engine", "take in", step_id=output.step_id):
            return super().update_from_output(output, model_output)


class Device(ModelRunner):
    """Another runner, watched: each of its steps is recorded, and takes at least ``step_s``."""

    def __init__(self, runner: ModelRunner, tracer: Tracer, *, step_s: float) -> None:
        self._runner = runner
        self._tracer = tracer
        self._step_s = step_s
        self._step_id = 0
        self._started_at = 0.0

    def execute_model(self, output: SchedulerOutput) -> None:
        self._step_id, self._started_at = output.step_id, time.monotonic()
        self._runner.execute_model(output)

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        result = self._runner.sample_tokens(bitmask)
        if result.rows.size:
            time.sleep(max(self._started_at + self._step_s - time.monotonic(), 0))
            ended_at = time.monotonic()
            self._tracer.add_span(
                "device", "step", self._started_at, ended_at, step_id=self._step_id
            )
        return result

    def get_kv_cache_spec(self) -> KVCacheSpec:
        return self._runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        return self._runner.determine_available_memory()

    def initialize_from_config(self, config: KVCacheConfig) -> None:
        self._runner.initialize_from_config(config)

    def close(self) -> None:
        self._runner.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the same requests through every loop, and compare; the exit status."""
    options = parse_arguments(arguments)
    try:
        outcomes = [run(depth, options) for depth in DEPTHS]
    except (PdcoreError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(outcomes, options)
    draw(outcomes[:2], options.out / "rhythm.png")
    is_same = all(outcome.tokens == outcomes[0].tokens for outcome in outcomes)
    print("the tokens are the same" if is_same else "WRONG: the tokens differ")
    return 0 if is_same else 1


def run(depth: int, options: argparse.Namespace) -> Outcome:
    """Run all requests through one loop."""
    tracer = Tracer(f"depth {depth}", lanes=("engine", "device"))
    limits = Limits(max_num_seqs=options.num_requests, max_model_len=256)
    make_runner = choose_runner(options, limits)
    executor = InProcessExecutor(
        lambda: Device(make_runner(), tracer, step_s=1e-3 * options.device_ms),
        num_blocks=NUM_BLOCKS,
    )
    executor.start()
    try:
        return run_requests(TracedScheduler(tracer, limits), executor, tracer, depth, options)
    finally:
        executor.close()


def run_requests(
    scheduler: TracedScheduler,
    executor: InProcessExecutor,
    tracer: Tracer,
    depth: int,
    options: argparse.Namespace,
) -> Outcome:
    """The loop, which is the same for both ways to step."""
    tokens: dict[str, list[int]] = {}
    sampling = SamplingParams(max_tokens=options.max_tokens, temperature=0.0)
    for index in range(options.num_requests):
        prompt = range(100 + index, 132 + index)
        scheduler.add_request(Request(f"r{index}", prompt, sampling=sampling))
        tokens[f"r{index}"] = []
    queue = BatchQueue(scheduler, executor, depth=max(depth, 1))
    run_step: Callable[[], StepResult] = queue.step if depth else lambda: step(scheduler, executor)
    num_steps, started_at = 0, time.monotonic()
    while scheduler.has_requests():
        result = run_step()
        num_steps += bool(result.token_ids.size)
        with tracer.span("engine", "app", step_id=result.step_id):
            for output in result.outputs:
                tokens[output.request_id].extend(output.new_token_ids)
            time.sleep(1e-3 * options.app_ms)  # what an application does with them
    seconds = time.monotonic() - started_at
    trace = tracer.snapshot()
    return Outcome(depth=depth, tokens=tokens, num_steps=num_steps, seconds=seconds, trace=trace)


def choose_runner(options: argparse.Namespace, limits: Limits) -> Callable[[], ModelRunner]:
    """What makes the runner: the stand-in, or a real model."""
    if options.model is None:
        return lambda: FakeKVRunner(block_size=BLOCK_SIZE)
    from pd.chat_model import find_model  # with --model alone: these bring torch
    from pdcore.runner import GPUModelRunner

    path = find_model(None if options.model == "smollm2" else options.model)
    threads = options.num_threads
    return lambda: GPUModelRunner(path, limits=limits, block_size=BLOCK_SIZE, num_threads=threads)


def print_table(outcomes: Sequence[Outcome], options: argparse.Namespace) -> None:
    """What each loop made of the same requests."""
    print(
        f"{options.num_requests} requests of {options.max_tokens} tokens; a step takes the device "
        f"at least {options.device_ms:g} ms, and then the application {options.app_ms:g} ms\n"
    )
    print(f"{'loop':20}  steps/s  tokens/s  device idle")
    for outcome in outcomes:
        num_tokens = sum(map(len, outcome.tokens.values()))
        print(
            f"{outcome.name:20}  {outcome.num_steps / outcome.seconds:7.1f}"
            f"  {num_tokens / outcome.seconds:8.1f}  {outcome.idle_share:10.0%}"
        )
    print()


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write a PNG of a few steps from the middle of each run, on one scale."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture without matplotlib: pip install 'pdcore[demo]'")
        return
    from matplotlib import pyplot

    from pd.lanes import draw_rows  # matplotlib takes a second

    path.parent.mkdir(parents=True, exist_ok=True)
    starts = [middle(outcome.trace) for outcome in outcomes]
    width_ms = 1e3 * max(end - start for start, end in starts)
    figure, axes = pyplot.subplots(
        len(outcomes), 1, figsize=(14, 1.8 * len(outcomes) + 0.6), layout="constrained"
    )
    for axis, outcome, (start, _) in zip(axes, outcomes, starts, strict=True):
        title = f"{outcome.name}: the device is idle for {outcome.idle_share:.0%} of the time"
        bars = make_bars(outcome.trace, start)
        draw_rows(axis, outcome.trace.lanes, bars, (0, width_ms), title, with_labels=True)
    axes[-1].set_xlabel("milliseconds; odd steps blue, even steps orange")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"picture: {path}")


def middle(trace: Trace) -> tuple[float, float]:
    """From when to when the steps to be shown ran on the device."""
    spans = [span for span in trace.spans if span.lane == "device"]
    first = len(spans) // 2
    last = min(first + _NUM_STEPS_SHOWN, len(spans)) - 1
    return spans[first].start, spans[last].end


def make_bars(trace: Trace, start: float) -> list[Bar]:
    """A trace's spans in milliseconds since ``start``, coloured by step."""
    from pd.lanes import Bar, in_ms

    def bar(span: Span) -> Bar:
        step_id = span.args["step_id"]
        return Bar(
            row=span.lane,
            start=span.start,
            end=span.end,
            colour=_COLOURS[step_id % 2 == 0],
            label=f"{span.name} {step_id}",
        )

    return [in_ms(bar(span), start) for span in trace.spans]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device-ms", type=float, default=10.0, metavar="T", help="a step's least (default: 10)")
    add("--app-ms", type=float, default=8.0, metavar="E", help="for a step's tokens (default: 8)")
    add("--num-requests", type=int, default=8, metavar="N", help="at once (default: 8)")
    add("--max-tokens", type=int, default=100, metavar="N", help="of each (default: 100)")
    add("--model", metavar="PATH", help="run a real model; 'smollm2' is the one of the demo")
    add("--num-threads", type=int, default=1, metavar="N", help="for the model (default: 1)")
    add("--out", type=Path, default=Path("out"), metavar="DIR", help="for the picture")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
