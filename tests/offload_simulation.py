"""Random lives of engines that keep KV in host memory and on a disk that cannot be trusted."""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random

from engine_simulation import Simulation
from pdcore.connector import KVConnector, OffloadCounts, SchedulerConnector, WorkerConnector
from pdcore.connector.offload import OffloadConfig, OffloadConnector, OffloadSchedulerConnector
from pdcore.connector.offload.records import HEADER_BYTES
from pdcore.kvcache import PrefixHasher

__all__ = ["OffloadSimulation", "TappedOffload", "make_config"]

SECRET = b"the same for every engine of the test"
SLOT_BYTES = 8


def make_config(
    block_size: int, *, num_host_blocks: int, num_disk_blocks: int = 0, **options: object
) -> OffloadConfig:
    """Room for so many blocks of the fake runner."""
    record_bytes = HEADER_BYTES + SLOT_BYTES * block_size
    return OffloadConfig(
        host_bytes=num_host_blocks * record_bytes,
        disk_bytes=num_disk_blocks * record_bytes,
        **options,  # type: ignore[arg-type]
    )


class TappedOffload(KVConnector):
    """A connector whose halves the test can reach."""

    def __init__(self, inner: OffloadConnector) -> None:
        self.worker = inner.worker_side()
        self.scheduler = inner.scheduler_side()

    def worker_side(self, rank: int = 0) -> WorkerConnector:
        return self.worker

    def scheduler_side(self) -> SchedulerConnector:
        return self.scheduler

    def meet(self) -> None:
        """Introduce them, once the worker knows its memory."""
        self.scheduler.set_xfer_handshake_metadata([self.worker.get_handshake_metadata()])


class OffloadSimulation(Simulation):
    """One engine with two tiers behind its pool; others before and after it have its directory."""

    # Few and short requests, so that prefixes come back after they were evicted.
    pool_blocks = (4, 18)
    max_new_tokens = 8
    pause = 0.6
    salts = (None, None, None, None, None, "salt")
    loras = (None,)

    def __init__(
        self, random: Random, directory: Path, *, depth: int, background: bool = False
    ) -> None:
        hasher = PrefixHasher(random.choice((2, 4, 4)), secret=SECRET)
        self.directory, self.background = directory, background
        num_disk_blocks = random.choice((0, random.randint(1, 60), random.randint(60, 150)))
        config = make_config(
            hasher.block_size,
            num_host_blocks=random.choice((random.randint(1, 16), random.randint(30, 80))),
            num_disk_blocks=num_disk_blocks,
            directory=directory,
            persistent=num_disk_blocks > 0 and random.random() < 0.8,
            background=background,
        )
        connector = TappedOffload(OffloadConnector(config))
        super().__init__(random, depth=depth, connector=connector, hasher=hasher)
        connector.scheduler.start(clock=self.scheduler.clock, notify=lambda: None)
        connector.meet()
        self.broken: tuple[int, int] | None = None
        self.half: OffloadSchedulerConnector = connector.scheduler

    @property
    def counts(self) -> OffloadCounts:
        return self.half.stats().offload

    def disturb(self, num_added: int) -> None:
        super().disturb(num_added)
        if self.rarely(0.03):
            self.spoil_files()
        self.mend_disk()
        if self.rarely(0.01):
            self.break_disk()
        if self.rarely(0.01):
            self.scheduler.reset_prefix_cache(preempt_running=self.rarely(0.5))
        self.half.check()

    def step(self) -> None:
        super().step()
        stats = self.scheduler.stats()
        is_waiting = stats.num_parked or stats.num_quarantined_blocks
        if self.background and is_waiting and not stats.num_running:
            # As a loop that waits for loads, wanted or not: their thread needs the interpreter.
            time.sleep(0.0005)

    def break_disk(self) -> None:
        """Until the next step, writes end with "no space left", and reads give zeros."""
        for name in os.listdir("/proc/self/fd"):
            if os.path.realpath(f"/proc/self/fd/{name}").startswith(f"{self.directory}/"):
                self.broken = (int(name), os.dup(int(name)))
                full = os.open("/dev/full", os.O_RDWR)
                os.dup2(full, int(name))
                os.close(full)
                return

    def mend_disk(self) -> None:
        """The opposite of `break_disk`."""
        if self.broken is not None:
            descriptor, original = self.broken
            os.dup2(original, descriptor)
            os.close(original)
            self.broken = None

    def spoil_files(self) -> None:
        """Change bytes of the files, or cut them."""
        random = self.random
        for path in sorted(self.directory.glob("*.kv")):
            size = path.stat().st_size
            if size and self.rarely(0.5):
                os.truncate(path, random.randrange(size))
                continue
            with path.open("r+b") as file:
                for _ in range(random.randint(1, 20)):
                    file.seek(random.randrange(max(size, 1)))
                    file.write(bytes([random.randrange(256)]))

    def run(self, *, num_requests: int) -> None:
        super().run(num_requests=num_requests)
        self.half.check()
        self.mend_disk()
        self.runner.close()
        self.half.close()
