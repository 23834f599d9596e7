"""What peers tell by way of others, as requests bring it: read, and compared with the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pdcore.connector.nixl.addresses import AllowedPeers
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.peer_params import PeerParams
from pdcore.connector.ticket_contents import prompt_digest
from pdcore.errors import InvalidTransferParams
from pdcore.request import Request

__all__ = ["ParamsReader"]

ParamsT = TypeVar("ParamsT", bound=PeerParams)


class ParamsReader:
    """Takes nothing on trust: form, size, signature, address and prompt are checked.

    Args:
        config: the connector's settings.
    """

    def __init__(self, config: NixlConfig) -> None:
        self._config = config
        self._allowed = AllowedPeers(config.allowed_peers)

    def read(self, kind: type[ParamsT], data: Mapping[str, Any], request: Request) -> ParamsT:
        """Parameters of one kind that came with a request.

        Raises:
            InvalidTransferParams: they are not acceptable, or belong to another prompt.
        """
        params = kind.from_dict(
            data,
            key=self._config.key,
            allowed_peers=self._allowed,
            max_num_bytes=self._config.max_params_bytes,
        )
        if params.prompt_digest != prompt_digest(request):
            raise InvalidTransferParams(kind.form.mix_up)
        return params
