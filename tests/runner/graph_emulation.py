"""What a CUDA graph does, done on a CPU: the same calls again, over the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pdcore.runner.attention.base import AttentionBatch, AttentionSupport
from pdcore.runner.attention.torch_backend import TorchAttentionBackend

__all__ = ["ForbidWaiting", "MaskedBackend", "RecordedGraphs"]

_WAITING = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "_unique2",
}


def is_waiting(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call would make the host wait for a CUDA device."""
    name = func._schema.name.removeprefix("aten::")
    if name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple):
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return name in _WAITING


class ForbidWaiting(TorchDispatchMode):
    """Fails at the first call that would make the host wait for a CUDA device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_waiting(func, args):
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@attrs.frozen(eq=False)
class _Address:
    """Memory that was there before the capture. Nothing here keeps it alive."""

    storage: StorageWeakRef
    tensor: tuple[torch.dtype, int, torch.Size, tuple[int, ...]]

    @classmethod
    def of(cls, tensor: Tensor) -> _Address:
        place = (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())
        return cls(StorageWeakRef(tensor.untyped_storage()), place)

    def find(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise RuntimeError("a graph was replayed over memory that had been freed")
        dtype, offset, size, stride = self.tensor
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


@attrs.frozen(eq=False)
class _Call:
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    results: tuple[Tensor, ...]


class Recording(TorchDispatchMode):
    """One captured graph."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._own: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_waiting(func, args):
            raise RuntimeError(f"{func} is not permitted when a stream is capturing")
        result = func(*args, **kwargs)
        before = {_storage(leaf) for leaf in _tensors((args, kwargs))}
        new = tuple(leaf for leaf in _tensors(result) if _storage(leaf) not in before)
        if new or func._schema.is_mutable:
            self.note(func, args, kwargs, new)
        return result

    def note(self, func: Any, args: Any, kwargs: Any, new: tuple[Tensor, ...] = ()) -> None:
        """Take down a call whose results are new memory."""
        args, kwargs = tree_map(self._by_reference, (args, kwargs))
        self._calls.append(_Call(func, args, kwargs, new))
        self._own.update(map(_storage, new))

    def spoil(self) -> None:
        """Overwrite all memory of the graph's own: other graphs use it between replays."""
        for call in self._calls:
            for result in call.results:
                is_number = result.is_floating_point() or result.is_complex()
                result.fill_(torch.nan if is_number else 77)

    def replay(self) -> None:
        """Do it all again."""
        for call in self._calls:
            args, kwargs = tree_map(_find, (call.args, call.kwargs))
            again = call.func(*args, **kwargs)
            for result, value in zip(call.results, _tensors(again), strict=False):
                result.copy_(value)

    def _by_reference(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
            return leaf
        return leaf if _storage(leaf) in self._own else _Address.of(leaf)


class RecordedGraphs:
    """Makes graphs on a CPU.

    Attributes:
        num_replays: of each graph, in the order of capture.
        recording: the graph that is being captured, or None.
    """

    def __init__(self) -> None:
        self.num_replays: list[int] = []
        self.recording: Recording | None = None

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self.recording = recording = Recording()
        try:
            with recording:
                run()
        finally:
            self.recording = None
        recording.spoil()
        index = len(self.num_replays)
        self.num_replays.append(0)

        def replay() -> None:
            self.num_replays[index] += 1
            recording.replay()
            recording.spoil()

        return replay


def _storage(tensor: Tensor) -> StorageWeakRef | int:
    if tensor.layout != torch.strided:
        return id(tensor)
    return StorageWeakRef(tensor.untyped_storage())


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _find(leaf: Any) -> Any:
    return leaf.find() if isinstance(leaf, _Address) else leaf


class MaskedBackend(TorchAttentionBackend):
    """Decodes over the whole width of the block tables, masked by lengths on the device."""

    support = AttentionSupport(contiguous_only=True, graph_decodes=True)

    def _bind(self, kv_cache: Tensor) -> None:
        super()._bind(kv_cache)
        self._cache = kv_cache

    def plan(self, batch: AttentionBatch) -> None:
        self._is_masked = batch.num_decodes == batch.query_lens.size
        if not self._is_masked:
            super().plan(batch)
            return
        self._batch = batch
        self._blocks = batch.block_tables.to(torch.int64)
        slots = torch.arange(self._blocks.shape[1] * self.shape.block_size)
        lengths = self.lengths(batch)[:, None]
        self._is_seen = {
            window: (slots < lengths) & (slots >= lengths - (window or slots.shape[0]))
            for window in dict.fromkeys(self.shape.windows)
        }

    def lengths(self, batch: AttentionBatch) -> Tensor:
        """How many slots each decode sees."""
        return batch.device_seq_lens

    def forward(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        if not self._is_masked:
            return super().forward(layer, query, key_value)
        shape, batch, cache = self.shape, self._batch, self._cache[:, layer]
        # Into (blocks, slots, keys and values, heads, elements).
        cache.transpose(1, 2)[batch.slot_blocks, batch.slot_offsets] = key_value
        is_seen = self._is_seen[shape.windows[layer]]
        keys, values = (
            cache[self._blocks, kind].flatten(1, 2).masked_fill(~is_seen[:, :, None, None], 0.0)
            for kind in (0, 1)
        )
        grouped = query.reshape(query.shape[0], shape.num_kv_heads, -1, shape.head_dim)
        scores = torch.einsum("nkgd,nskd->nkgs", grouped, keys) * shape.scale
        weights = scores.masked_fill(~is_seen[:, None, None], -torch.inf).softmax(-1)
        return torch.einsum("nkgs,nskd->nkgd", weights, values).reshape(query.shape)
