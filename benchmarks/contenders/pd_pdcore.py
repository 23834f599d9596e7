"""pdcore's prefill/decode pair: the two engine processes of the demo, without its chats."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import attrs
from pd_timing import FreshPrompts, Timeline, cpu_shares, figures
from serving import serve

from pd.messages import EngineFailed, EngineReady, EngineSettings, NewTokens, RequestDone, Submit
from pd.processes import EngineProcess

_TIMEOUT_S = 600.0
_PREFILL_CHUNK = 512


class Pair:
    """Two engines and what a router does between them."""

    def __init__(self, settings: EngineSettings) -> None:
        # In chunks as the demo's, so that those who wait for KV wait for a part of the queue only.
        prefill = attrs.evolve(settings, role="prefill", max_num_batched_tokens=_PREFILL_CHUNK)
        self.prefill = EngineProcess(prefill)
        self.decode = EngineProcess(settings)
        self._engines = (self.prefill, self.decode)
        self._num_sent = 0
        num_ready = 0
        for message in self._messages():
            num_ready += isinstance(message, EngineReady)
            if num_ready == len(self._engines):
                break

    @property
    def pids(self) -> list[int]:
        return [engine.pid for engine in self._engines if engine.pid is not None]

    def complete(self, requests: list[list[int]], num_tokens: int) -> list[Timeline]:
        """Send all at once; return when each one's tokens came."""
        lines: dict[str, Timeline] = {}
        prompt_of: dict[str, tuple[int, ...]] = {}
        for prompt in requests:
            self._num_sent += 1
            name = f"request-{self._num_sent}"
            prompt_of[name] = tuple(prompt)
            lines[name] = Timeline()
            self._submit(self.prefill, name, prompt_of[name], 1, {"do_remote_decode": True})
        remaining = set(lines)
        for message in self._messages():
            if isinstance(message, NewTokens) and message.role == "decode":
                lines[message.request_id].token_times += [message.time] * len(message.token_ids)
            elif isinstance(message, RequestDone) and message.role == "prefill":
                name, params = message.request_id, message.kv_transfer_params
                self._submit(self.decode, name, prompt_of[name], num_tokens, params)
            elif isinstance(message, RequestDone):
                if not message.num_external_tokens:
                    raise RuntimeError(f"{message.request_id} moved no KV: {message.cause}")
                remaining.discard(message.request_id)
            if not remaining:
                return list(lines.values())
        raise RuntimeError("the engines ended")

    def close(self) -> None:
        """End both engines."""
        for engine in self._engines:
            engine.kill()
            engine.close()

    def _submit(
        self,
        engine: EngineProcess,
        name: str,
        prompt: tuple[int, ...],
        max_tokens: int,
        params: dict[str, Any] | None,
    ) -> None:
        engine.send(
            Submit(
                request_id=name,
                prompt_token_ids=prompt,
                max_tokens=max_tokens,
                eos_token_id=None,
                kv_transfer_params=params,
            )
        )

    def _messages(self) -> Iterator[Any]:
        while True:
            connections = [engine.connection for engine in self._engines]
            if not wait(connections, timeout=_TIMEOUT_S):
                raise RuntimeError(f"the engines said nothing for {_TIMEOUT_S:g} s")
            for engine in self._engines:
                for message in engine.receive():
                    if isinstance(message, EngineFailed):
                        raise RuntimeError(f"the {message.role} engine failed: {message.cause}")
                    yield message


def main() -> None:
    """Start the pair and answer tasks."""
    options = argparse.ArgumentParser()
    options.add_argument("model")
    options.add_argument("--dtype", required=True)
    options.add_argument("--threads", type=int, required=True)
    arguments = options.parse_args()
    pair = Pair(
        EngineSettings(
            role="decode",
            model=arguments.model,
            device="cpu",
            dtype=arguments.dtype,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            num_blocks=2048,
            num_threads=arguments.threads,
            key=secrets.token_bytes(32),
        )
    )

    fresh = FreshPrompts()

    def complete(*, count: int, prompt: int, num_tokens: int, at_once: bool, seed: int) -> Any:
        requests = fresh.take(count, prompt, seed)
        if at_once:
            return figures(pair.complete(requests, num_tokens))
        return figures([pair.complete([request], num_tokens)[0] for request in requests])

    try:
        serve({"complete": complete, "idle": lambda seconds: cpu_shares(pair.pids, seconds)})
    finally:
        pair.close()


if __name__ == "__main__":
    main()
