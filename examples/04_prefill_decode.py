"""Prefill and decode in two processes, with KV moved by NIXL, on a real model.

One process computes the prompts, the other continues them. Each is an engine put together from
pdcore's parts (pd/assembly.py, 100 lines) with a loop of its own (pd/engine.py), which plans a step
while the one before it runs. A router in this process sends each prompt to the first and what comes
of it to the second. In the end the same prompts go through a single engine, one step at a time, and
the answers must be the same, token for token.

Writes OUT/timeline.png and OUT/trace.json (for Perfetto, or chrome://tracing). The exit status is 0
only when every chat was answered and every answer is right.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

from pd.chat_model import ChatTokenizer, find_model
from pd.check import NEAR_TIE_LOGITS, compare, shortcomings
from pd.messages import EngineSettings
from pd.processes import EngineProcess
from pd.progress import make_progress
from pd.prompts import demo_chats
from pd.report import COLUMNS, summary, table
from pd.router import Answer, DemoError, Router
from pdcore.errors import PdcoreError
from pdcore.trace import Trace, write_chrome_trace

_PREFILL_CHUNK = 256
_DECODE_ROWS = 4


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="Hugging Face folder with safetensors, or GGUF file (default: SmolLM2-135M-Instruct)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument(
        "--dtype",
        choices=tuple(NEAR_TIE_LOGITS),
        help="of weights and KV (default: float32 on a CPU, bfloat16 on CUDA)",
    )
    parser.add_argument(
        "--max-tokens", type=_positive, default=40, metavar="N", help="longest answer (default: 40)"
    )
    parser.add_argument(
        "--depth",
        type=_positive,
        default=2,
        metavar="K",
        help="plans under way in each engine; 1 runs one step at a time (default: 2)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="for the files (default: out)"
    )
    parser.add_argument(
        "--kill-prefill",
        action="store_true",
        help="kill the prefill process in the middle; the decode process takes over its work",
    )
    parser.add_argument(
        "--deadline",
        type=_positive,
        default=300,
        metavar="S",
        help="give up after so many seconds of serving, or of checking (default: 300)",
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def run(options: argparse.Namespace) -> bool:
    """Run the demo; whether all is as it should be."""
    deadline = time.monotonic() + options.deadline
    model = find_model(options.model)
    options.out.mkdir(parents=True, exist_ok=True)
    settings = EngineSettings(
        role="decode",
        model=str(model),
        device=options.device,
        dtype=options.dtype,
        max_num_seqs=_DECODE_ROWS,
        num_threads=max(1, _num_cpus() // 2),
        depth=options.depth,
        key=secrets.token_bytes(32),
    )
    print(f"model {model.name}; two processes of {settings.num_threads} thread(s) each", flush=True)
    print(
        "starting both engines; the whole run takes two to three minutes on two cores", flush=True
    )
    answers, router, tokenizer = _prefill_and_decode(settings, options, deadline)
    traces = [router.traces[role] for role in ("prefill", "decode") if role in router.traces]
    print(f"\n{table(answers, router.traces.get('decode'))}\n\n{COLUMNS}\n\n{summary(answers)}")
    _write_timeline(traces, options)
    # The self-check starts another engine, so it has a time of its own.
    deadline = time.monotonic() + options.deadline
    return _check(answers, settings, tokenizer, options, deadline)


def _prefill_and_decode(
    settings: EngineSettings, options: argparse.Namespace, deadline: float
) -> tuple[list[Answer], Router, ChatTokenizer]:
    prefill_settings = attrs.evolve(
        settings, role="prefill", max_num_seqs=8, max_num_batched_tokens=_PREFILL_CHUNK
    )
    progress = make_progress()  # its clock shows how long engines and tokenizer take to load
    with EngineProcess(prefill_settings) as prefill, EngineProcess(settings) as decode:
        tokenizer = ChatTokenizer.load(Path(settings.model))
        router = Router(
            prefill=prefill,
            decode=decode,
            tokenizer=tokenizer,
            progress=progress,
            max_tokens=options.max_tokens,
            deadline=deadline,
            kill_prefill=options.kill_prefill,
        )
        return router.run(demo_chats()), router, tokenizer


def _write_timeline(traces: Sequence[Trace], options: argparse.Namespace) -> None:
    from pd.timeline import draw_timeline  # matplotlib takes a second

    picture, record = options.out / "timeline.png", options.out / "trace.json"
    write_chrome_trace(record, traces)
    draw_timeline(picture, traces, title="Prefill and decode in two processes, KV over NIXL")
    print(f"timeline: {picture}, and {record} for Perfetto", flush=True)


def _check(
    answers: Sequence[Answer],
    settings: EngineSettings,
    tokenizer: ChatTokenizer,
    options: argparse.Namespace,
    deadline: float,
) -> bool:
    """Run the same chats through one engine, one step at a time, and compare."""
    print(
        "self-check: the same chats through one engine, which takes about a minute ...", flush=True
    )
    solo_settings = attrs.evolve(settings, role="solo", keeps_candidates=True, depth=1)
    with EngineProcess(solo_settings) as solo:
        router = Router(
            decode=solo, tokenizer=tokenizer, max_tokens=options.max_tokens, deadline=deadline
        )
        expected = router.run(demo_chats())
    faults = shortcomings(answers, needs_transfer=not options.kill_prefill)
    faults += shortcomings(expected, needs_transfer=False)
    for fault in faults:
        print(f"self-check: WRONG: {fault}")
    dtype = router.ready["solo"].dtype
    differences = compare(answers, expected, router.candidates, dtype=dtype)
    for difference in differences:
        verdict = "near-tie" if difference.is_excused else "WRONG"
        print(f"self-check: {verdict}: {difference.words}")
    num_wrong = sum(not difference.is_excused for difference in differences)
    rule = (
        "token for token"
        if not NEAR_TIE_LOGITS[dtype]
        else f"up to near-ties of less than {NEAR_TIE_LOGITS[dtype]:g} logits"
    )
    print(f"self-check: {len(answers) - num_wrong} of {len(answers)} answers equal, {rule}")
    return not (num_wrong or faults)


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


def main() -> int:
    """Run the demo from the command line; the exit status."""
    options = parse_arguments()
    try:
        return 0 if run(options) else 1
    except (DemoError, PdcoreError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
