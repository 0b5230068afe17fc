"""The properties of a vLLM server, from what the server tells about itself over HTTP."""

from __future__ import annotations

import re

import msgspec

from moonpool.discovery.rank_counts import engines_in
from moonpool.protocol.model_offer import (
    COMPLETIONS,
    MEDIA_PATHS,
    POOLING_PATHS,
    ModelOffer,
    OfferedAdapter,
)
from moonpool.types import MALFORMED
from moonpool.vllm.dialect import DialectError
from moonpool.vllm.known_cache import PrefixCounts

ALL_PATHS = (COMPLETIONS, *MEDIA_PATHS, *POOLING_PATHS)
_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.M)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_COUNTER = r"^vllm:{}_total{} (\S+)$"
_COUNTS = ("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_hits")
_UNBOUNDED_CONTEXTS = 64
"""How many contexts a server without KVCache is assumed to hold at a time."""


class VllmFacts(msgspec.Struct, frozen=True):
    """`offer` is what the server serves; the other fields describe its KVCache. `make`: the make of
    the server. `assumed`: the properties that the server does not tell, in words; "" means that it
    tells all. `num_slots`: number of places for one sequence each into which its KVCache is
    divided; 0 means that it is not divided. `num_ranks`: number of data-parallel ranks behind its
    address."""

    offer: ModelOffer
    block_tokens: int
    num_blocks: int
    caches_prefixes: bool = True
    make: str = "vLLM"
    assumed: str = ""
    num_slots: int = 0
    num_ranks: int = 1

    @property
    def model_id(self) -> str:
        """The name by which this server knows its model."""
        return self.offer.names[0]


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Document(msgspec.Struct):
    paths: dict[str, msgspec.Raw]


_MODELS = msgspec.json.Decoder(_Models)
_DOCUMENT = msgspec.json.Decoder(_Document)


def read_facts(
    models: bytes, metrics: str, document: bytes = b"", rank: int | None = None
) -> VllmFacts:
    """Reads the properties from `/v1/models`, `/metrics` and `/openapi.json`, which a server may
    lack (b""). `rank`: the data-parallel rank whose facts are read. Raises DialectError."""
    listed = _read_models(models)
    own = [model for model in listed if not model.parent]
    if not own or not own[0].max_model_len:
        raise DialectError(
            "its /v1/models states no max_model_len: it is another server than vLLM, which moonpool"
            " cannot serve"
        )
    model = own[0]
    offer = ModelOffer(
        root=model.root or model.id,
        names=tuple(dict.fromkeys(one.id for one in own if one.root == model.root)),
        max_model_tokens=own[0].max_model_len,
        paths=_read_paths(document) if document else ALL_PATHS,
        adapters=tuple(
            OfferedAdapter(name=one.id, root=one.root or one.id) for one in listed if one.parent
        ),
    )
    if not offer.paths:
        raise DialectError("it serves neither completions nor embeddings, scores or classes")
    return _with_cache(offer, metrics, rank)


def _with_cache(offer: ModelOffer, metrics: str, rank: int | None) -> VllmFacts:
    """Raises DialectError."""
    found = [dict(_LABEL.findall(labels)) for labels in _CACHE_INFO.findall(metrics)]
    ranks = {each["engine"]: each for each in found if "engine" in each}
    engine = None if rank is None else engine_of(metrics, rank)
    if rank is not None and ranks and engine is None:
        raise DialectError(
            f"it has no data-parallel rank {rank}, but {len(ranks)}, which are counted from 0"
        )
    if not found:
        raise DialectError(
            "its /metrics has no vllm:cache_config_info: it is another server than vLLM, or was"
            " started with --disable-log-stats, which must be left out"
        )
    labels = ranks.get(engine or "", found[0])
    block_size, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
    block_tokens = int(block_size) if block_size.isdigit() else 0
    # Without a rank, the facts of all ranks together are read.
    counted = [labels] if rank is not None or not ranks else list(ranks.values())
    numbers = [each.get("num_gpu_blocks", "") for each in counted]
    num_blocks = sum(map(int, numbers)) if all(map(str.isdigit, numbers)) else 0
    if block_tokens and num_blocks:
        caches = labels.get("enable_prefix_caching") != "False"
        return VllmFacts(offer, block_tokens, num_blocks, caches, num_ranks=max(len(ranks), 1))
    if offer.generates:
        raise DialectError(
            f"its vllm:cache_config_info states num_gpu_blocks {blocks!r} of block_size"
            f" {block_size!r}: moonpool needs vLLM 0.10.2 or newer"
        )
    block_tokens = block_tokens or 16  # an encoder has no KVCache, so the block size is arbitrary
    contexts = -(-offer.max_model_tokens // block_tokens) * _UNBOUNDED_CONTEXTS
    return VllmFacts(offer, block_tokens, contexts, caches_prefixes=False)


def engine_of(metrics: str, rank: int) -> str | None:
    """Returns the name in `/metrics` of the server's rank, which counts from 0 at each address, or
    None if the server has no such rank."""
    engines = engines_in(metrics)
    return engines[rank] if rank < len(engines) else None


def _read_models(models: bytes) -> list[_Model]:
    try:
        return _MODELS.decode(models).data
    except MALFORMED as error:
        raise DialectError(f"its /v1/models does not have vLLM's format: {error}") from None


def _read_paths(document: bytes) -> tuple[str, ...]:
    try:
        paths = _DOCUMENT.decode(document).paths
    except MALFORMED:
        return ALL_PATHS
    return tuple(path for path in ALL_PATHS if path in paths)


def read_counts(metrics: str, rank: int | None = None) -> PrefixCounts | None:
    """Reads the hits of the prefix cache from `/metrics`, or None if it has none. `rank`: the
    data-parallel rank whose counts are read; None means the sums of all."""
    labels = r"(?:\{.*\})?"
    if rank is not None:
        engine = engine_of(metrics, rank) or str(rank)
        labels = rf'\{{(?:.*,)?engine="{engine}"(?:,.*)?\}}'
    found = [re.findall(_COUNTER.format(name, labels), metrics, re.M) for name in _COUNTS]
    if not all(found[:2]):
        return None
    try:
        return PrefixCounts(*(sum(map(float, numbers)) for numbers in found))
    except ValueError:
        return None
