"""How much memory a KV cache may take."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from pdcore.errors import ConfigError
from pdcore.kvcache.spec import KVCacheSpec

__all__ = ["DEFAULT_UTILIZATION", "allocate_cache", "available_memory", "stand_in"]

DEFAULT_UTILIZATION = {"cuda": 0.9, "cpu": 0.4}
"""Of a CUDA device's whole memory, which a worker has to itself; of a host's free memory, which it
shares with other processes, perhaps other workers."""


def available_memory(
    device: torch.device, *, utilization: float | None, trial: Callable[[], None]
) -> int:
    """Return how many bytes are left for the KV cache after a trial run.

    Args:
        device: where the cache will live.
        utilization: which share may be used in all, in (0, 1]; None takes `DEFAULT_UTILIZATION`.
        trial: runs the largest step once. On CUDA its peak is measured and taken off; on a CPU the
            free memory is read after it, when the allocator has grown to what the step needs.

    Raises:
        ConfigError: nothing is left.
    """
    if utilization is None:
        utilization = DEFAULT_UTILIZATION[device.type]
    if device.type == "cuda":
        num_bytes = _available_on_cuda(device, utilization, trial)
    else:
        trial()
        num_bytes = int(_free_host_bytes() * utilization)
    if num_bytes <= 0:
        raise ConfigError(
            f"the model and its largest step leave no memory for the KV cache on {device} at "
            f"memory_utilization={utilization}. Raise it, or lower max_num_batched_tokens."
        )
    return num_bytes


def allocate_cache(
    num_blocks: int, spec: KVCacheSpec, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Make a KV cache of zeros, (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim).

    Raises:
        ConfigError: there is not so much memory.
    """
    try:
        return torch.zeros((num_blocks, *spec.block_shape), dtype=dtype, device=device)
    except RuntimeError as error:  # torch has no narrower one on a CPU
        raise ConfigError(
            f"{num_blocks} blocks of {spec.bytes_per_block} bytes cannot be allocated on "
            f"{device} ({error}). Give the KV cache less memory."
        ) from error


def stand_in(device: torch.device, run: Callable[[], None]) -> torch.Tensor:
    """Do ``run``, and return a tensor as large as what that took beside what was there before.

    It holds the place of memory that will be taken for good once it is known how much is left. On a
    CPU, where nothing is measured this way, it is empty.
    """
    num_bytes = 0
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        num_bytes = torch.cuda.max_memory_allocated(device) - before
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _available_on_cuda(device: torch.device, utilization: float, trial: Callable[[], None]) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    trial()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # What others, and libraries outside torch's allocator, hold on the device is not ours to use.
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    return int(total * utilization) - peak - elsewhere


def _free_host_bytes() -> int:
    """Memory that can be had without swapping; Linux says so, elsewhere the free pages must do."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
