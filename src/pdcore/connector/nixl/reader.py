"""Reading from one peer, on a thread of its own, with an agent of its own."""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from pdcore.connector.nixl.agent import TransferAgent
from pdcore.connector.nixl.meta import ReadTask
from pdcore.connector.nixl.mover import MoveResult, PeerMover

__all__ = ["PeerReader", "ReadResult"]

ReadResult: TypeAlias = MoveResult[ReadTask]
"""How one read ended."""


class PeerReader(PeerMover[ReadTask]):
    """Reads blocks from one peer; see `PeerMover`."""

    verb: ClassVar[str] = "read"

    def _post(
        self,
        agent: TransferAgent,
        local_ids: npt.NDArray[np.int32],
        remote_ids: npt.NDArray[np.int32],
    ) -> tuple[Any, bool]:
        return agent.post_read(local_ids, remote_ids)
