"""vLLM's own prefill/decode pair: `vllm serve` twice with its NixlConnector, and what a proxy does.

Runs in vLLM's interpreter. The standard library's HTTP client takes the proxy's place, so that no
second hop is counted. The set-up follows vLLM's documentation of disaggregated serving on CPU.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from pd_timing import FreshPrompts, Timeline, cpu_shares, figures
from serving import serve

_START_TIMEOUT_S = 900.0
_KV_TRANSFER = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}


class Server:
    """One `vllm serve`."""

    def __init__(self, model: str, *, dtype: str, place: int, port: int, side_port: int) -> None:
        self.port = port
        log = Path(tempfile.gettempdir()) / f"vllm-pd-{port}.log"
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model),
                *("--host", "127.0.0.1", "--port", str(port), "--dtype", dtype),
                *("--max-model-len", "2048", "--max-num-seqs", "64", "--served-model-name", "m"),
                *("--kv-transfer-config", json.dumps(_KV_TRANSFER)),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
                "VLLM_CPU_OMP_THREADS_BIND": str(place),
            },
        )

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if (status := self.process.poll()) is not None:
                raise RuntimeError(f"vllm serve ended with status {status}; see {self._log.name}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                time.sleep(1)
        raise RuntimeError(f"vllm serve did not start; see {self._log.name}")

    def ask(self, **body: Any) -> http.client.HTTPResponse:
        """Ask for a completion; the answer is not read yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({"model": "m", "temperature": 0.0, "ignore_eos": True, **body}),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"vLLM answered {response.status}: {response.read()[:500]!r}")
        return response

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._log.close()


def complete_one(
    prefill: Server, decode: Server, prompt: list[int], num_tokens: int, line: Timeline
) -> None:
    """One request through both servers; notes when its tokens come."""
    with prefill.ask(
        prompt=prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}
    ) as response:
        params = json.load(response)["kv_transfer_params"]
    with decode.ask(
        prompt=prompt, max_tokens=num_tokens, stream=True, kv_transfer_params=params
    ) as response:
        for event in response:
            if event.startswith(b"data: {") and json.loads(event[6:])["choices"]:
                line.token_times.append(time.monotonic())


def main() -> None:
    """Start the pair and answer tasks."""
    options = argparse.ArgumentParser()
    options.add_argument("model")
    options.add_argument("--dtype", required=True)
    options.add_argument("--port", type=int, default=18_100)
    arguments = options.parse_args()
    servers = [
        Server(
            arguments.model,
            dtype=arguments.dtype,
            place=place,
            port=arguments.port + place,
            side_port=arguments.port + 10 + place,
        )
        for place in (0, 1)
    ]
    try:
        for server in servers:
            server.wait()
        _serve(servers)
    finally:
        for server in servers:
            server.close()


def _serve(servers: list[Server]) -> None:
    fresh = FreshPrompts()

    def complete(*, count: int, prompt: int, num_tokens: int, at_once: bool, seed: int) -> Any:
        lines: list[Timeline] = []
        threads: list[threading.Thread] = []
        for tokens in fresh.take(count, prompt, seed):
            lines.append(Timeline())
            arguments = (*servers, tokens, num_tokens, lines[-1])
            threads.append(threading.Thread(target=complete_one, args=arguments))
            threads[-1].start()
            if not at_once:
                threads[-1].join()
        for thread in threads:
            thread.join()
        if not all(len(line.token_times) == num_tokens for line in lines):
            raise RuntimeError(f"tokens that came: {[len(line.token_times) for line in lines]}")
        return figures(lines)

    pids = [server.process.pid for server in servers]
    serve({"complete": complete, "idle": lambda seconds: cpu_shares(pids, seconds)})


if __name__ == "__main__":
    main()
