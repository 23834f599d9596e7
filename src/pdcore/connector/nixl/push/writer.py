"""Writing to one peer, on a thread of its own, with an agent of its own."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.connector.nixl.agent import TransferAgent
from pdcore.connector.nixl.mover import PeerMover
from pdcore.messages import TransferKey

__all__ = ["PeerWriter", "Write"]


@attrs.frozen(kw_only=True, eq=False)
class Write:
    """One write: the i-th local block goes into the i-th remote one.

    Args:
        transfer: names the write.
        local_block_ids, remote_block_ids: int32, of equal length.
    """

    transfer: TransferKey
    local_block_ids: npt.NDArray[np.int32]
    remote_block_ids: npt.NDArray[np.int32]


class PeerWriter(PeerMover[Write]):
    """Writes blocks to one peer; see `PeerMover`."""

    verb: ClassVar[str] = "write"

    def _post(
        self,
        agent: TransferAgent,
        local_ids: npt.NDArray[np.int32],
        remote_ids: npt.NDArray[np.int32],
    ) -> tuple[Any, bool]:
        return agent.post_write(local_ids, remote_ids)
