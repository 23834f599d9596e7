"""Which device a runner takes, and that everything it does happens on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_emulation import MaskedBackend, RecordedGraphs
from runner_driver import RunnerDriver

from pdcore.connector.base import KVCaches, WorkerConnector
from pdcore.errors import ConfigError
from pdcore.messages import TransferReport
from pdcore.runner import device as devices
from pdcore.runner import gpu
from pdcore.runner.device import choose_device, on_device
from pdcore.runner.gpu import GPUModelRunner
from pdcore.scheduler.base import Limits


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two CUDA devices, of which the second is the current one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("name", "number"), [(None, 1), ("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_cuda_device_has_a_number(name: str | None, number: int) -> None:
    """So that it stays the same device in threads for which another one is the current one."""
    assert choose_device(name) == torch.device("cuda", number)


@pytest.mark.usefixtures("two_gpus")
def test_a_cuda_device_that_is_not_there_is_refused() -> None:
    """In words that name the last one, and not when its memory is asked for."""
    with pytest.raises(
        ConfigError, match=r"sees 2 CUDA device\(s\), the last of which is 'cuda:1'"
    ):
        choose_device("cuda:2")


def test_a_cuda_device_is_made_the_current_one() -> None:
    """Not just any; and on a CPU there is nothing to make."""
    guard = on_device(torch.device("cuda:1"))
    assert isinstance(guard, torch.cuda.device)
    assert guard.idx == 1
    assert not isinstance(on_device(torch.device("cpu")), torch.cuda.device)


class Guards:
    """Stands in for `on_device`: which device is the current one, in each thread.

    Attributes:
        seen: what was done, and which device was the current one then.
    """

    def __init__(self) -> None:
        self._current = threading.local()
        self.seen: dict[str, set[torch.device | None]] = {}

    @contextmanager
    def __call__(self, device: torch.device) -> Iterator[None]:
        before = getattr(self._current, "device", None)
        self._current.device = device
        yield
        self._current.device = before

    def note(self, what: str) -> None:
        self.seen.setdefault(what, set()).add(getattr(self._current, "device", None))


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> Guards:
    made = Guards()
    monkeypatch.setattr(devices, "on_device", made)
    monkeypatch.setattr(gpu, "on_device", made)
    return made


def watched(guards: Guards, base: type[Any], *names: str) -> type[Any]:
    """A class whose methods say when they are called."""

    def tell(name: str) -> Any:
        method = getattr(base, name)

        def told(self: Any, *args: Any, **kwargs: Any) -> Any:
            guards.note(name)
            return method(self, *args, **kwargs)

        return told

    return type(f"Watched{base.__name__}", (base,), {name: tell(name) for name in names})


class Quiet(WorkerConnector):
    """Moves nothing."""

    def register_kv_caches(self, caches: KVCaches) -> None:
        pass

    def start_load_kv(self, meta: Any) -> None:
        pass

    def get_finished(self) -> TransferReport:
        return TransferReport()

    def needs_layer_calls(self) -> bool:
        return False


def test_all_that_a_runner_does_happens_on_its_device(tiny_llama: Path, guards: Guards) -> None:
    """Loading, measuring, capturing, both kinds of steps and the end, from whichever thread."""

    class Graphs(RecordedGraphs):
        def capture(self, run: Any) -> Any:
            guards.note("capture")
            replay = super().capture(run)

            def again() -> None:
                guards.note("replay")
                replay()

            return again

    backend = watched(guards, MaskedBackend, "__init__", "bind", "plan", "forward")
    connector = watched(
        guards,
        Quiet,
        "register_kv_caches",
        "start_load_kv",
        "wait_for_save",
        "get_finished",
        "close",
    )
    runner = GPUModelRunner(
        tiny_llama,
        limits=Limits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32),
        device="cpu",
        block_size=4,
        attention_backend=backend,
        connector=connector(),
        graph_capture=Graphs(),
        seed=0,
    )

    def serve() -> None:
        runner.determine_available_memory()
        driver = RunnerDriver(runner, num_blocks=16)
        driver.connector_meta = "m"
        driver.start(0, [1, 2, 3, 4, 5])
        driver.prefill(0)
        driver.decode(2)
        runner.close()

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert set(guards.seen) == {
        *("__init__", "bind", "plan", "forward", "capture", "replay"),
        *("register_kv_caches", "start_load_kv", "wait_for_save", "get_finished", "close"),
    }
    assert set().union(*guards.seen.values()) == {runner.device}
