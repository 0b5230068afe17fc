"""Queries a server: models, vocabulary, SLOs, and its counters before and after a run.

A server other than moonpool answers only `/v1/models`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from moonpool.http_client.client import ConnectionFailedError, HttpClient
from moonpool.http_client.trust import untrusted_hint
from moonpool.types import MALFORMED

ASSUMED_VOCAB = 1000
"""Token ids below this number are ordinary tokens in nearly every vocabulary."""


class ServerUnfitError(Exception):
    """The server cannot be used; the text says why and what to do."""


class ServerFacts(msgspec.Struct, frozen=True):
    """What a server tells about itself; `config` is None unless it is a moonpool server."""

    model: str
    vocab_size: int | None
    max_model_tokens: int | None
    config: dict[str, Any] | None


async def query_server(client: HttpClient, model: str | None) -> ServerFacts:
    """Queries the server. Raises ServerUnfitError if no server answers, an API key is missing, or
    the server lacks the model."""
    try:
        status, body = await client.get("/v1/models")
    except ConnectionFailedError as error:
        what_to_do = untrusted_hint(error) or "start one with `moonpool serve`, or correct the URL"
        raise ServerUnfitError(
            f"no server answers at {client.url} ({error}): {what_to_do}"
        ) from None
    if status in (401, 403):
        raise ServerUnfitError(
            f"{client.url} needs an API key ({status}): give --api-key or set OPENAI_API_KEY"
        )
    listed = _json(body) if status == 200 else {}
    data = listed.get("data")
    found = [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []
    cards = {card["id"]: card for card in found if isinstance(card.get("id"), str)}
    if not cards:
        raise ServerUnfitError(
            f"{client.url} lists no models at /v1/models (status {status}): it is no"
            " OpenAI-compatible server"
        )
    if model is not None and model not in cards:
        raise ServerUnfitError(f"{client.url} has no model {model!r}; it has {', '.join(cards)}")
    chosen = model or next(iter(cards))
    info = await _moonpool_info(client)
    vocab_size = info["model"]["vocab_size"] if info else None
    config = info["config"] if info else None
    return ServerFacts(chosen, vocab_size, cards[chosen].get("max_model_len"), config)


async def _moonpool_info(client: HttpClient) -> dict[str, Any] | None:
    try:
        status, body = await client.get("/server_info")
    except ConnectionFailedError:
        return None
    found = _json(body) if status == 200 else {}
    model, config = found.get("model"), found.get("config")
    if not isinstance(model, dict) or not isinstance(config, dict):
        return None  # vLLM answers otherwise
    return found if "vocab_size" in model and "slo" in config else None


async def read_counters(client: HttpClient) -> dict[str, float]:
    """Returns the counters and gauges of `/metrics` by name and labels, or nothing if the server
    has none.

    The labels of model and engine are left out.
    """
    try:
        status, body = await client.get("/metrics")
    except ConnectionFailedError:
        return {}
    return parse_metrics(body.decode(errors="replace")) if status == 200 else {}


def parse_metrics(text: str) -> dict[str, float]:
    """Parses metrics: `name{model_name="m",reason="x"} 3.0` becomes `name{x}`: 3.0."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        plain, _, labels = name.partition("{")
        if plain.endswith("_bucket"):
            continue
        kept = [
            label.partition("=")[2].strip('"')
            for label in labels.rstrip("}").split('",')
            if label and not label.startswith(("model_name=", "engine="))
        ]
        key = f"{plain}{{{','.join(kept)}}}" if kept else plain
        try:
            found[key] = found.get(key, 0.0) + float(value)
        except ValueError:
            continue
    return found


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except MALFORMED:
        return {}
    return found if isinstance(found, dict) else {}
