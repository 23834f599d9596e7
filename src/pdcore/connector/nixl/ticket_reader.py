"""Tickets as requests bring them: read, and compared with the request."""

from __future__ import annotations

from pdcore.connector.nixl.addresses import AllowedPeers
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.params import TransferParams
from pdcore.connector.ticket_contents import prompt_digest
from pdcore.errors import InvalidTransferParams
from pdcore.request import Request

__all__ = ["TicketReader"]


class TicketReader:
    """Takes nothing on trust: form, size, signature, address and prompt are checked.

    Args:
        config: the connector's settings.
    """

    def __init__(self, config: NixlConfig) -> None:
        self._config = config
        self._allowed = AllowedPeers(config.allowed_peers)

    def read(self, request: Request) -> TransferParams:
        """The ticket of a request that has ``kv_transfer_params``.

        Raises:
            InvalidTransferParams: it is not acceptable, or belongs to another prompt.
        """
        assert request.kv_transfer_params is not None
        params = TransferParams.from_dict(
            request.kv_transfer_params,
            key=self._config.key,
            allowed_peers=self._allowed,
            max_num_bytes=self._config.max_params_bytes,
        )
        if params.prompt_digest != prompt_digest(request):
            raise InvalidTransferParams(
                "kv_transfer_params belong to another prompt: pass the ticket with the same "
                "prompt_token_ids and lora that the prefill engine had"
            )
        return params
