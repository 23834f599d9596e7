"""The eviction order against a plain list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.kvcache import LRUOrder


@pytest.mark.parametrize("num_blocks", [9, 80])
@given(data=st.data())
def test_lru_order_is_a_list_that_can_be_undone(num_blocks: int, data: st.DataObject) -> None:
    """append, discard and pop act as on a list, and undoing the last ones brings it back."""
    order, model = LRUOrder(num_blocks), []
    history = []
    for _ in range(data.draw(st.integers(0, 60))):
        before = list(model)
        outside = sorted(set(range(1, num_blocks)) - set(model))
        kind = data.draw(st.sampled_from(["append", "discard", "pop", "undo"]))
        if kind == "append":
            ids = data.draw(st.permutations(outside))[: data.draw(st.integers(0, len(outside)))]
            history.append((order.append(np.array(ids, np.intp)), before))
            model += ids
        elif kind == "discard":
            ids = [block for block in model if data.draw(st.booleans())]
            history.append((order.discard(np.array(ids, np.intp)), before))
            model = [block for block in model if block not in ids]
        elif kind == "pop":
            n = data.draw(st.integers(0, len(model)))
            if n:
                ids, undo = order.pop(n)
                assert ids.tolist() == model[:n]
                history.append((undo, before))
                model = model[n:]
        elif history:
            undo, model = history.pop()
            undo()
            model = list(model)
        assert order.ids().tolist() == model
        assert len(order) == len(model)
        assert order.contains(np.arange(num_blocks)).nonzero()[0].tolist() == sorted(model)
