"""Which tokens the structured rows of a plan may draw."""

from __future__ import annotations

import numpy as np

from pdcore.messages import GrammarBitmask, SchedulerOutput
from pdcore.scheduler.core import Core
from pdcore.scheduler.state import RequestState

__all__ = ["make_bitmask"]


def make_bitmask(core: Core, output: SchedulerOutput) -> GrammarBitmask | None:
    """Ask the grammars of the rows that draw; None if no row has one.

    A grammar that raises ends its request with the next plan.
    """
    table = core.table
    if not (table.num_with_matcher or core.departed):
        return None
    is_current = table.epoch[output.rows] == output.epochs
    is_constrained = is_current & table.has_matcher[output.rows]
    states: dict[int, RequestState] = {}
    # Who gave way meanwhile still gets its token.
    for place in (~is_current).nonzero()[0].tolist():
        state = core.departed.get((int(output.rows[place]), int(output.epochs[place])))
        if state is not None and state.matcher is not None:
            is_constrained[place], states[place] = True, state
    places = (is_constrained & output.samples).nonzero()[0]
    if not places.size:
        return None
    assert core.grammar is not None
    rows = output.rows[places]
    bits = np.zeros((rows.size, -(-core.grammar.vocab_size // 32)), np.int32)
    for place, row, line in zip(places.tolist(), rows.tolist(), bits, strict=True):
        state = states.get(place) or table.state(row)
        assert state.matcher is not None
        try:
            state.matcher.fill_bitmask(line)
        except Exception as error:
            core.failing.append((state, f"its grammar raised {error!r}"))
    return GrammarBitmask(rows=rows, epochs=output.epochs[places], bits=bits)
