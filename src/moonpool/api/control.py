"""The endpoints that change the cluster rather than ask it: for whoever runs it, on the head's own
machine."""

from __future__ import annotations

from ipaddress import ip_address

import msgspec

from moonpool.api.bodies import decode_body
from moonpool.api.errors import ApiError
from moonpool.api.exchange import Exchange
from moonpool.api.frontend import Frontend
from moonpool.api.options import ApiOptions

MAX_WITHIN_S = 3600.0


class DrainBody(msgspec.Struct):
    instance_id: str
    within_s: float = 60.0


_DRAIN = msgspec.json.Decoder(DrainBody)


class Controller:
    """Hands on to one frontend what passed the door."""

    def __init__(self, frontend: Frontend, options: ApiOptions):
        self._frontend = frontend
        self._options = options

    async def drain(self, exchange: Exchange) -> None:
        """Answers at once; `/cluster` shows how it goes on."""
        _check_local(exchange)
        options = self._options
        body = decode_body(
            _DRAIN, await exchange.read_body(options.max_body_bytes, options.body_timeout_s)
        )
        if not 0 <= body.within_s <= MAX_WITHIN_S:
            text = f"'within_s' must be 0 to {MAX_WITHIN_S:.0f} seconds."
            raise ApiError(text, status=400, param="within_s")
        refusal = self._frontend.drain(body.instance_id, body.within_s)
        if refusal:
            raise ApiError(refusal, status=409, param="instance_id", code="cannot_drain")
        await exchange.respond(200, msgspec.json.encode({"draining": body.instance_id}))


def _check_local(exchange: Exchange) -> None:
    """A key lets its owner ask for answers, not shut instances down."""
    host = (exchange.scope.get("client") or ("",))[0]
    try:
        local = ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        text = "This is only for clients on the head's own machine: send it to 127.0.0.1."
        raise ApiError(text, status=403, code="not_local")
