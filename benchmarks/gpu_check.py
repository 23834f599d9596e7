"""Checks pdcore on a GPU: correctness, decode speed against its floor, and KV transfer.

    python benchmarks/gpu_check.py --model PATH [--device cuda] [--json FILE]

1. Greedy tokens of the engine, for each attention backend and dtype, with CUDA graphs and without,
   against a dense float32 forward pass of transformers over the same tokens.
2. The same steps with and without CUDA graphs, logits compared, while the batch grows and shrinks.
3. Steady decode steps under torch's check for hidden synchronisation.
4. Time of a decode step for several batch sizes, with and without CUDA graphs, against the time to
   read the weights and the KV once at the device's measured copy bandwidth.
5. Bandwidth of a KV read between two engines of this process over NIXL.

Takes a few minutes. With ``--device cpu`` it runs too, without 2 and 3, as a check of itself. Exit
status 1 when a token differs where the two best logits are not nearly tied, or a step waits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdcore import (
    KVCacheManager,
    Limits,
    LRUBlockPool,
    MonotonicClock,
    Request,
    SamplingParams,
    UnifiedScheduler,
)
from pdcore.errors import MissingExtra
from pdcore.kvcache import KVCacheConfig
from pdcore.loop import Waker
from pdcore.messages import ModelRunnerOutput
from pdcore.runner import GPUModelRunner

BLOCK_SIZE = 16
NUM_BLOCKS = 4096
Figures = dict[str, Any]
GRAPH_SIZES: dict[str, tuple[int, ...] | None] = {"on": None, "off": ()}
# A token may differ only where the reference's two best logits are closer than this.
TIE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}


class Engine:
    """A scheduler and a runner, stepped by hand so that steps can be timed."""

    def __init__(self, model: Path, *, connector: Any = None, side: Any = None, **options: Any):
        self.limits = Limits(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=1024)
        self.runner = GPUModelRunner(
            model, limits=self.limits, block_size=BLOCK_SIZE, connector=connector, **options
        )
        self.spec = self.runner.get_kv_cache_spec()
        started = time.perf_counter()
        self.runner.initialize_from_config(KVCacheConfig(spec=self.spec, num_blocks=NUM_BLOCKS))
        self.initialize_s = time.perf_counter() - started
        manager = KVCacheManager(LRUBlockPool(NUM_BLOCKS, BLOCK_SIZE))
        self.scheduler = UnifiedScheduler(manager, limits=self.limits, connector=side)
        self.tokens: dict[str, list[int]] = {}
        self.params: dict[str, Any] = {}

    def add(
        self,
        name: str,
        prompt: Any,
        *,
        max_tokens: int,
        params: Any = None,
        temperature: float = 0.0,
    ) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=0.9, min_p=0.01, seed=0
        )
        self.tokens[name] = []
        self.scheduler.add_request(
            Request(name, prompt, sampling=sampling, kv_transfer_params=params)
        )

    def step(self) -> ModelRunnerOutput:
        plan = self.scheduler.schedule()
        self.runner.execute_model(plan)
        drawn = self.runner.sample_tokens(None)
        result = self.scheduler.update_from_output(plan, drawn)
        for output in result.outputs:
            self.tokens[output.request_id].extend(output.new_token_ids)
            if output.kv_transfer_params is not None:
                self.params[output.request_id] = output.kv_transfer_params
        return drawn

    def admit_all(self) -> None:
        """Step until nobody waits and every prompt is computed."""
        while self.scheduler.stats().num_waiting or not all(self.tokens.values()):
            self.step()

    def run(self) -> None:
        while self.scheduler.has_requests():
            self.step()


def make_prompts(vocab_size: int) -> list[list[int]]:
    """Of 5 to 300 tokens, so that prompts are chunked, batched and padded."""
    rng = np.random.default_rng(0)
    return [rng.integers(100, vocab_size, n).tolist() for n in (5, 16, 33, 64, 127, 300)]


def check_tokens(
    model: Path, reference: Any, *, device: str, dtype: str, backend: str, graphs: str
) -> Figures:
    """Compare an engine's greedy tokens with the dense reference; return what differs."""
    engine = Engine(
        model,
        device=device,
        dtype=dtype,
        attention_backend=backend,
        cuda_graph_sizes=GRAPH_SIZES[graphs],
    )
    prompts = make_prompts(engine.runner.vocab_size)
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, max_tokens=32)
    engine.run()
    engine.runner.close()
    num_ties, wrong = 0, []
    for index, prompt in enumerate(prompts):
        tokens = engine.tokens[str(index)]
        with torch.inference_mode():
            ids = torch.tensor([prompt + tokens[:-1]], device=device)
            logits = reference(ids).logits[0, len(prompt) - 1 :].float()
        best = logits.max(-1).values
        gap = best - logits.gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0]
        num_ties += int((gap > 0).sum())
        wrong += [
            (index, place, value) for place, value in enumerate(gap.tolist()) if value > TIE[dtype]
        ]
    return {
        "check": "tokens",
        "backend": backend,
        "graphs": graphs,
        "dtype": dtype,
        "num_tokens": 32 * len(prompts),
        "num_near_ties": num_ties - len(wrong),
        "wrong": wrong,
    }


def compare_graphs(model: Path, device: str, dtype: str) -> Figures:
    """Run the same steps with and without graphs: 6 rows, then 12, then fewer and fewer."""
    engines = [
        Engine(model, device=device, dtype=dtype, cuda_graph_sizes=sizes, keep_logits=True)
        for sizes in GRAPH_SIZES.values()
    ]
    prompts = make_prompts(engines[0].runner.vocab_size)
    difference, num_steps, parted = 0.0, 0, set()
    wrong: list[Any] = []
    while num_steps == 0 or engines[0].scheduler.has_requests():
        for engine in engines if num_steps in (0, 10) else ():
            for index, prompt in enumerate(prompts):
                engine.add(f"{num_steps}-{index}", prompt, max_tokens=12 + 9 * index)
        captured, eager = (engine.step() for engine in engines)
        num_steps += 1
        if captured.rows.tolist() != eager.rows.tolist():
            wrong.append((num_steps, captured.errors, eager.errors))
            break
        logits = [engine.runner.logits for engine in engines]
        tenants = list(zip(eager.rows.tolist(), eager.epochs.tolist(), strict=True))
        alike = [place for place, tenant in enumerate(tenants) if tenant not in parted]
        if not alike or logits[0] is None or logits[1] is None:
            continue
        # Rows that once drew another token have another past: they are compared no more.
        difference = max(difference, float((logits[0] - logits[1])[alike].abs().max()))
        for place in alike:
            mine, theirs = (int(drawn.sampled_token_ids[place, 0]) for drawn in (captured, eager))
            if mine != theirs:
                parted.add(tenants[place])
                gap = float(logits[1][place, theirs] - logits[1][place, mine])
                wrong += [(num_steps, place, gap)] if gap > TIE[dtype] else []
    for engine in engines:
        engine.runner.close()
    return {
        "check": "graphs against eager",
        "dtype": dtype,
        "num_steps": num_steps,
        "largest_logit_difference": difference,
        "num_near_ties": len(parted) - len(wrong),
        "wrong": wrong,
    }


def check_waiting(model: Path, device: str, dtype: str, backend: str, graphs: str) -> Figures:
    """Decode with torch set to refuse to wait, but for the event behind the tokens."""
    sizes = GRAPH_SIZES[graphs]
    engine = Engine(
        model, device=device, dtype=dtype, attention_backend=backend, cuda_graph_sizes=sizes
    )
    for index, prompt in enumerate(make_prompts(engine.runner.vocab_size)):
        engine.add(str(index), prompt, max_tokens=60, temperature=0.8 * (index % 2))
    engine.admit_all()
    wrong = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        try:
            torch.ones(1, device=device).item()
            wrong.append("torch did not notice a wait that was there")
        except RuntimeError:
            pass
        for _ in range(40):  # over the ends of blocks, too
            engine.step()
    except RuntimeError as error:
        wrong.append(str(error))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.runner.close()
    return {"check": "waits", "backend": backend, "graphs": graphs, "wrong": wrong}


def copy_bandwidth(device: str) -> float:
    """Bytes a second that a large copy reads and writes."""
    size = 1 << (30 if device == "cuda" else 27)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        _synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return 2 * size / min(times)


def time_decode(
    engine: Engine, batch: int, *, context: int, bandwidth: float, device: str, graphs: str
) -> Figures:
    """The median decode step of a batch, and its floor."""
    rng = np.random.default_rng(1)
    for index in range(batch):
        prompt = rng.integers(100, engine.runner.vocab_size, context)
        engine.add(f"{batch}-{index}", prompt, max_tokens=100)
    engine.admit_all()
    times = []
    for _ in range(40):
        _synchronize(device)
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    engine.scheduler.abort_requests(list(engine.tokens))
    engine.run()
    engine.tokens.clear()
    weights = engine.runner.num_weight_bytes
    kv = batch * (context + 24) * engine.spec.bytes_per_block / BLOCK_SIZE
    floor = (weights + kv) / bandwidth
    median = statistics.median(times)
    return {
        "check": "decode",
        "graphs": graphs,
        "batch": batch,
        "context": context,
        "step_ms": 1e3 * median,
        "floor_ms": 1e3 * floor,
        "share_of_floor": floor / median,
    }


def time_transfer(model: Path, device: str, dtype: str) -> Figures:
    """Read a long prompt's KV from one engine into another over NIXL."""
    from pdcore.connector.nixl import NixlConfig, NixlConnector

    waker, engines, sides = Waker(), [], []
    for name in ("prefill", "decode"):
        connector = NixlConnector(NixlConfig(block_size=BLOCK_SIZE, engine_id=name))
        worker, side = connector.worker_side(), connector.scheduler_side()
        engines.append(Engine(model, connector=worker, side=side, device=device, dtype=dtype))
        side.start(clock=MonotonicClock(), notify=waker)
        side.set_xfer_handshake_metadata([worker.get_handshake_metadata()])
        sides.append(side)
    prefill, decode = engines
    rng = np.random.default_rng(2)
    for index in range(5):
        prompt = rng.integers(100, prefill.runner.vocab_size, 1000)
        name = str(index)
        prefill.add(name, prompt, max_tokens=1, params={"do_remote_decode": True})
        while name not in prefill.params:
            prefill.step()
        decode.add(name, prompt, max_tokens=2, params=prefill.params[name])
        while decode.scheduler.status(name) is not None:
            decode.step()
            prefill.step()
    moved = decode.scheduler.stats().connector.transfers
    for side, engine in zip(sides, engines, strict=True):
        side.close()
        engine.runner.close()
    best = max(moved, key=lambda stats: stats.num_bytes_per_s)
    return {
        "check": "nixl",
        "num_transfers": len(moved),
        "num_bytes": best.num_bytes,
        "num_descriptors": best.num_descriptors,
        "best_GB_per_s": best.num_bytes_per_s / 1e9,
    }


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def load_reference(model: Path, device: str) -> Any:
    """The dense float32 model of transformers."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32}
    if model.is_file():
        options["gguf_file"] = model.name
    folder = model.parent if model.is_file() else model
    return AutoModelForCausalLM.from_pretrained(folder, **options).to(device).eval()


def main() -> int:
    """Run every check; print a line for each, and the settings first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="HF folder or GGUF file")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    # What there is: attention backends, with CUDA graphs where they can be captured.
    ways = [("torch", "off"), ("triton", "off"), ("triton", "on")]
    if args.device == "cpu":
        ways = ways[:1]
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {args.model.name}, seeds 0 to 2")
    results: list[Figures] = []

    def report(result: Figures) -> None:
        results.append(result)
        print(
            "  ".join(
                f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items()
            ),
            flush=True,
        )

    reference = load_reference(args.model, args.device)
    common = {"device": args.device, "dtype": args.dtypes[-1]}
    for dtype in args.dtypes:
        for backend, graphs in ways:
            of_run = {**common, "dtype": dtype, "backend": backend, "graphs": graphs}
            report(check_tokens(args.model, reference, **of_run))
    del reference
    if args.device == "cuda":
        for dtype in args.dtypes:
            report(compare_graphs(args.model, args.device, dtype))
        for backend, graphs in ways:
            report(check_waiting(args.model, **common, backend=backend, graphs=graphs))
    bandwidth = copy_bandwidth(args.device)
    report({"check": "copy", "GB_per_s": bandwidth / 1e9})
    for graphs in dict.fromkeys(graphs for _, graphs in ways):
        engine = Engine(args.model, **common, cuda_graph_sizes=GRAPH_SIZES[graphs])
        report({"check": "start", "graphs": graphs, "initialize_s": engine.initialize_s})
        of_run = {"bandwidth": bandwidth, "device": args.device, "graphs": graphs}
        for batch in args.batches:
            report(time_decode(engine, batch, context=256, **of_run))
        engine.runner.close()
    try:
        report(time_transfer(args.model, args.device, args.dtypes[-1]))
    except MissingExtra as error:
        report({"check": "nixl", "skipped": str(error)})
    if args.json:
        args.json.write_text(json.dumps(results, indent=2), encoding="utf-8")
    return int(any(result.get("wrong") for result in results))


if __name__ == "__main__":
    sys.exit(main())
