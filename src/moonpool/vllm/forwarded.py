"""Forwarded calls: the body that a vLLM server gets, and what its response says of tokens."""

from __future__ import annotations

import msgspec

from moonpool.protocol.messages import AttemptSpec
from moonpool.types import MALFORMED, FinishReason, Token
from moonpool.vllm.actions import EngineOutput
from moonpool.vllm.block_names import salt_of
from moonpool.vllm.dialect import DialectError

OWN_FIELDS = ("request_id", "priority", "cache_salt", "kv_transfer_params", "ec_transfer_params")
"""Fields that the head decides on, or that would let clients reach other servers and requests."""


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    output_tokens: int | None = None


class _Whole(msgspec.Struct):
    usage: _Usage | None = None


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_WHOLE = msgspec.json.Decoder(_Whole)
_encode = msgspec.json.encode


def forwarded_body(
    work: AttemptSpec, model_id: str, layout_fingerprint: bytes, has_pool: bool = False
) -> bytes:
    """Returns the client's body with the server's name of the model and the tenant's cache salt.
    Raises DialectError."""
    assert work.call is not None
    if len(work.token_ids) > work.num_prompt_tokens:
        raise DialectError("the answer cannot go on elsewhere; send the request again")
    try:
        fields = _FIELDS.decode(work.call.body)
    except MALFORMED as error:
        raise DialectError(f"the body is no JSON object: {error}", refused=True) from None
    for name in OWN_FIELDS:
        fields.pop(name, None)
    fields["model"] = msgspec.Raw(_encode(work.adapter or model_id))
    salt = salt_of(layout_fingerprint, work.tenant, work.adapter, has_pool)
    if salt is not None:
        fields["cache_salt"] = msgspec.Raw(_encode(salt))
    return _encode(fields)


def read_part(work: AttemptSpec, part: bytes) -> EngineOutput:
    """Returns a part of the response as an output. A stream has an event in each; a whole response
    counts the tokens that it says it has."""
    num_tokens = 1
    kind, _, whole = part.partition(b"\n")
    if kind.startswith(b"application/json"):
        num_tokens = max(_completion_tokens(whole), 1)
    empty = (Token(0),) * (num_tokens - 1)
    return EngineOutput(work.attempt_id, (Token(0, payload=part), *empty))


def end_of(work: AttemptSpec) -> EngineOutput:
    return EngineOutput(work.attempt_id, (), FinishReason.STOP)


def _completion_tokens(whole: bytes) -> int:
    try:
        usage = _WHOLE.decode(whole).usage
    except MALFORMED:
        return 0
    if usage is None:
        return 0
    return usage.completion_tokens or usage.output_tokens or 0
