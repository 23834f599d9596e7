"""The factory of the NIXL connector's two halves."""

from __future__ import annotations

import uuid

import attrs

from pdcore.connector.base import KVConnector
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.scheduler_side import NixlSchedulerConnector
from pdcore.connector.nixl.worker_side import NixlWorkerConnector

__all__ = ["NixlConnector"]


class NixlConnector(KVConnector):
    """Moves KV between engines with NIXL: the decode engine reads.

    A prompt computed with ``kv_transfer_params={"do_remote_decode": True}`` leaves a ticket, which
    another engine redeems when it is given to a request with the same prompt. What the decode
    engine read counts only once the prefill engine has vouched that the blocks were held all the
    time. With leave from `NixlSchedulerConnector.expect_push` the prefill engine sends what it has
    computed ahead of that, into staging memory, and only the rest is read.

    Args:
        config: settings; without an engine id, one is made here.
    """

    def __init__(self, config: NixlConfig) -> None:
        engine_id = config.engine_id or uuid.uuid4().hex
        self.config = attrs.evolve(config, engine_id=engine_id)

    def scheduler_side(self) -> NixlSchedulerConnector:
        return NixlSchedulerConnector(self.config)

    def worker_side(self, rank: int = 0) -> NixlWorkerConnector:
        return NixlWorkerConnector(self.config, rank=rank)
