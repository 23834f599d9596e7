"""The process that is read from: an engine without a model, and two raw NIXL agents."""

from __future__ import annotations

import base64
import threading
import time
from typing import Any

from kv_engine import KVEngine
from raw_nixl import RawAgent
from serving import serve

_POLL_S = 50e-6


class Peer:
    """Answers a benchmark's tasks."""

    def __init__(self) -> None:
        self._engine: KVEngine | None = None
        self._agents: list[RawAgent] = []
        self._is_raw = threading.Event()
        threading.Thread(target=self._poll_raw, daemon=True).start()

    def start(self, num_blocks: int, bytes_per_block: int) -> dict[str, Any]:
        """Make the engine."""
        if self._engine is not None:
            self._engine.close()
        self._engine = KVEngine(num_blocks, bytes_per_block, lease_s=60.0)
        return {}

    def raw(self, num_regions: int) -> dict[str, Any]:
        """Open the engine's memory to a raw agent, cut into regions."""
        assert self._engine is not None
        buffer = self._engine.buffer
        name = f"P{num_regions}-{len(self._agents)}"
        agent = RawAgent(name, buffer, num_regions=num_regions, num_blocks=buffer.shape[0])
        self._agents.append(agent)
        return {
            "metadata": base64.b64encode(agent.metadata()).decode(),
            "address": agent.address,
        }

    def serve_raw(self, is_on: bool) -> dict[str, Any]:
        """Poll the raw agents often, or rest."""
        (self._is_raw.set if is_on else self._is_raw.clear)()
        return {}

    def ticket(self, block_ids: list[int], first: int = 0) -> dict[str, Any]:
        """Hand some blocks over."""
        assert self._engine is not None
        self._engine.step()
        return self._engine.hand_over(block_ids, first)

    def prefill(self, **settings: Any) -> dict[str, Any]:
        """Compute a prompt step by step, sending it ahead if there is leave, and hand it over."""
        assert self._engine is not None
        return self._engine.prefill(**settings)

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()

    def rest(self, seconds: float) -> dict[str, Any]:
        """Idle; returns the share of a core that this process used."""
        assert self._engine is not None
        return {"share": self._engine.rest(seconds)}

    def _poll_raw(self) -> None:
        while True:
            self._is_raw.wait()
            for agent in self._agents:
                agent.progress()
            time.sleep(_POLL_S)


if __name__ == "__main__":
    peer = Peer()
    serve(
        {
            name: getattr(peer, name)
            for name in ("start", "raw", "serve_raw", "ticket", "prefill", "rest")
        }
    )
    peer.close()
