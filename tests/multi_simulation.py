"""A random life of a prefill and a decode engine that are joined by two bad wires at once, and may
each keep KV in host memory as well."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from offload_simulation import make_config
from pd_simulation import PDEngine, PDSimulation
from pdcore import VirtualClock
from pdcore.connector import KVConnector, MultiConnector, SchedulerConnector, WorkerConnector
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric
from pdcore.connector.offload import OffloadConnector

__all__ = ["MultiPDEngine", "MultiPDSimulation"]

# What they raise for ends with the request that it is about. The last one has done its work.
_MOODY_HOOKS = ("request_added", "get_num_new_matched_tokens", "update_state_after_alloc")


class _Moody(KVConnector):
    """A connector that now and then raises for one request, or has no answer yet."""

    def __init__(self, inner: KVConnector, random: Random) -> None:
        self._inner = inner
        self._random = random
        self._share = random.choice((0.0, 0.05, 0.3))

    def scheduler_side(self) -> SchedulerConnector:
        half = self._inner.scheduler_side()
        for name in _MOODY_HOOKS:
            setattr(half, name, self._raising(getattr(half, name), before=True))
        half.request_finished = self._raising(half.request_finished, before=False)  # type: ignore[method-assign]
        half.get_num_new_matched_tokens = self._hesitating(half.get_num_new_matched_tokens)  # type: ignore[method-assign]
        return half

    def worker_side(self, rank: int = 0) -> WorkerConnector:
        return self._inner.worker_side(rank)

    def _is_moody(self) -> bool:
        return self._random.random() < self._share

    def _raising(self, method: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
        def moody(*args: Any) -> Any:
            if before and self._is_moody():
                raise OSError("not today")
            answer = method(*args)
            if not before and self._is_moody():
                raise OSError("not today")
            return answer

        return moody

    def _hesitating(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def moody(*args: Any) -> Any:
            return None if self._is_moody() else method(*args)

        return moody


class MultiPDEngine(PDEngine):
    """One side of the pair, with a connector on each wire and perhaps one to host memory, in any
    order of preference."""

    # Small, so that prefixes come back after they were evicted.
    pool_blocks = (8, 24)

    def __init__(self, *args: Any, far: LoopbackFabric, **options: Any) -> None:
        self._far = far
        super().__init__(*args, **options)

    def make_connector(self, fabric: LoopbackFabric, name: str, block_size: int) -> KVConnector:
        random = self.random
        connectors: list[tuple[str, KVConnector]] = [
            (
                wire,
                LoopbackConnector(
                    each, engine_id=name, block_size=block_size, lease_s=random.choice((30, 3))
                ),
            )
            for wire, each in (("near", fabric), ("far", self._far))
        ]
        if random.random() < 0.5:
            config = make_config(
                block_size, num_host_blocks=random.randint(1, 60), background=False
            )
            connectors.append(("host", OffloadConnector(config)))
        random.shuffle(connectors)
        return MultiConnector({name: _Moody(each, random) for name, each in connectors})


class MultiPDSimulation(PDSimulation):
    """Two fabrics between the engines; each can be bad, and restart, by itself."""

    num_prefixes = 5

    def __init__(self, random: Random, *, depth: int) -> None:
        self._far: LoopbackFabric | None = None
        super().__init__(random, depth=depth, make_engine=self._make_engine)

    def _make_engine(
        self, random: Random, fabric: LoopbackFabric, clock: VirtualClock, **options: Any
    ) -> MultiPDEngine:
        if self._far is None:
            self._far = LoopbackFabric(clock=clock, faults=lambda load: self.faults())
        return MultiPDEngine(random, fabric, clock, far=self._far, **options)

    def restart(self) -> None:
        assert self._far is not None
        self.random.choice((self.fabric, self._far)).restart("prefill")
