"""Finds out the make of a server. No flag names the make, so the server is asked."""

from __future__ import annotations

import msgspec

from moonpool.types import MALFORMED
from moonpool.vllm.client import HEALTH_S, LACKS, VllmClient, VllmError, VllmSilentError
from moonpool.vllm.dialects.llama_server import LlamaDialect, is_props
from moonpool.vllm.dialects.openai_server import Listed, OpenAiDialect, read_listed
from moonpool.vllm.dialects.server_dialect import ServerDialect
from moonpool.vllm.dialects.sglang_server import INFO_PATHS, SglangDialect, read_info
from moonpool.vllm.dialects.vllm_server import VllmDialect


class _Version(msgspec.Struct):
    version: str


_VERSION = msgspec.json.Decoder(_Version)


async def find_dialect(client: VllmClient) -> ServerDialect:
    """Returns how the server is asked. Raises VllmError if the server is gone, silent or not
    healthy, and DialectError if it is not understood."""
    health = await client.health()
    if health == "silent":
        raise VllmSilentError(f"no answer within {HEALTH_S:g} s")
    if health != "well":
        raise VllmError("no server listens there") if health == "gone" else await _unwell(client)
    listed = read_listed(await client.get("/v1/models"))
    owners = {model.owned_by for model in listed}
    if "vllm" in owners:
        return VllmDialect(client)
    if is_props(await _asked(client, "/props")):
        return LlamaDialect(client)
    for path in INFO_PATHS:
        if read_info(await _asked(client, path)) is not None:
            return SglangDialect(client)
    if _is_version(await _asked(client, "/api/version")):
        return OpenAiDialect(client, "Ollama")
    if any("tensorrt" in owner for owner in owners):
        return OpenAiDialect(client, "TensorRT-LLM", takes_salt=True)
    if await _is_vllm(client, listed):
        return VllmDialect(client)
    return OpenAiDialect(client)


async def _unwell(client: VllmClient) -> VllmError:
    """Returns what is wrong with a server that answers, but whose health is not good."""
    try:
        await client.get("/v1/models")
    except VllmError as error:
        if error.status not in LACKS:
            return error  # such as the error of a missing API key
        return VllmError(
            "it serves neither /health nor /v1/models: give the URL of a model server, such as"
            " http://127.0.0.1:8100"
        )
    return VllmError("the server is not healthy: its /health says so")


async def _is_vllm(client: VllmClient, listed: list[Listed]) -> bool:
    """Whether the server is vLLM although its models name another owner, as behind a proxy and in
    some builds."""
    if any(model.max_model_len for model in listed):
        return True
    return b"vllm:" in await _asked(client, "/metrics")


def _is_version(found: bytes) -> bool:
    try:
        _VERSION.decode(found)
    except MALFORMED:
        return False
    return True


async def _asked(client: VllmClient, path: str) -> bytes:
    """Returns b"" if the server does not answer that path. Raises VllmError if it is gone."""
    try:
        return await client.get(path, optional=True)
    except VllmError as error:
        if error.status:
            return b""
        raise
