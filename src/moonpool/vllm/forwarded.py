"""Forwarded calls: the body that a vLLM server gets, and what its response says of tokens."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from moonpool.protocol.messages import AttemptSpec
from moonpool.types import MALFORMED, FinishReason, Token
from moonpool.vllm.actions import EngineOutput
from moonpool.vllm.block_names import salt_of
from moonpool.vllm.client import VllmClient
from moonpool.vllm.dialect import DialectError

OWN_FIELDS = ("request_id", "priority", "cache_salt", "kv_transfer_params", "ec_transfer_params")
"""Fields that are removed from a client's body: moonpool decides them, or they would let clients
reach other servers and requests."""


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    output_tokens: int | None = None


class _Whole(msgspec.Struct):
    usage: _Usage | None = None


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_WHOLE = msgspec.json.Decoder(_Whole)
_encode = msgspec.json.encode


def forwarded_body(
    attempt: AttemptSpec,
    model_id: str,
    layout_fingerprint: bytes,
    takes_salt: bool = True,
    more: Mapping[str, Any] = MappingProxyType({}),
    has_pool: bool = False,
) -> bytes:
    """Returns the client's body with the server's name of the model and the tenant's cache salt.
    `takes_salt`: whether the server knows the field of the salt. `more`: fields that only this make
    of server has; they replace the client's. `has_pool`: as in `SubmitRequest`. Raises
    DialectError."""
    assert attempt.call is not None
    if len(attempt.token_ids) > attempt.num_prompt_tokens:
        raise DialectError("the answer cannot go on elsewhere; send the request again")
    try:
        fields = _FIELDS.decode(attempt.call.body)
    except MALFORMED as error:
        raise DialectError(f"the body is no JSON object: {error}", refused=True) from None
    for name in (*OWN_FIELDS, *more):
        fields.pop(name, None)
    own: dict[str, Any] = {"model": attempt.adapter or model_id, **more}
    salt = salt_of(layout_fingerprint, attempt.tenant, attempt.adapter, has_pool)
    if salt is not None and takes_salt:
        own["cache_salt"] = salt
    fields |= {name: msgspec.Raw(_encode(value)) for name, value in own.items()}
    return _encode(fields)


async def forwarded_outputs(
    client: VllmClient, attempt: AttemptSpec, body: bytes
) -> AsyncGenerator[EngineOutput]:
    """The outputs of a call with this body. Raises VllmError."""
    assert attempt.call is not None
    parts = client.forward(attempt.call.path, body, attempt.traceparent)
    async with contextlib.aclosing(parts):
        async for part in parts:
            yield read_part(attempt, part)
    yield end_of(attempt)


def read_part(attempt: AttemptSpec, part: bytes) -> EngineOutput:
    """Returns a part of the response as an output, in the payload of its first token. A part of a
    stream is one event and counts as one token; a whole response counts the tokens that its usage
    states."""
    num_tokens = 1
    kind, _, whole = part.partition(b"\n")
    if kind.startswith(b"application/json"):
        num_tokens = max(_completion_tokens(whole), 1)
    empty = (Token(0),) * (num_tokens - 1)
    return EngineOutput(attempt.attempt_id, (Token(0, payload=part), *empty))


def end_of(attempt: AttemptSpec) -> EngineOutput:
    return EngineOutput(attempt.attempt_id, (), FinishReason.STOP)


def _completion_tokens(whole: bytes) -> int:
    try:
        usage = _WHOLE.decode(whole).usage
    except MALFORMED:
        return 0
    if usage is None:
        return 0
    return usage.completion_tokens or usage.output_tokens or 0
