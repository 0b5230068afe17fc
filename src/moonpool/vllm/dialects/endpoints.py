"""Finds out which endpoints a server has, if no document of the server says so."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.protocol.model_offer import MEDIA_PATHS
from moonpool.vllm.client import VllmClient, VllmError
from moonpool.vllm.dialect import REFUSALS


async def offered_paths(client: VllmClient, surely: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the paths in `surely`, and those of endpoints with messages that read an empty body
    before they refuse it. Raises VllmError if the server fails."""
    found = list(surely)
    for path in MEDIA_PATHS:
        if await takes_body(client, path):
            found.append(path)
    return tuple(found)


async def takes_body(client: VllmClient, path: str) -> bool:
    """Whether the server reads bodies at the endpoint. Raises VllmError if it fails."""
    try:
        return bool(await client.post(path, {}, optional=True))
    except VllmError as error:
        if error.status in REFUSALS or error.status >= 500:
            return True  # some servers answer 500 to a body that lacks all fields
        raise
