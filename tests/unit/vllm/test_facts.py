"""Tests how the reports of a vLLM server about itself are read, and how reports are refused that no
vLLM server sends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moonpool.protocol.model_offer import MEDIA_PATHS, ModelOffer, OfferedAdapter
from moonpool.vllm.dialect import DialectError
from moonpool.vllm.facts import ALL_PATHS, VllmFacts, read_counts, read_facts
from moonpool.vllm.known_cache import PrefixCounts

METRICS = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",num_cpu_blocks="None",num_gpu_blocks="8192"} 1.0
"""
MODELS = {"data": [{"id": "served", "root": "/models/m30", "max_model_len": 2048, "x": 1}]}
GENERATING = ("/v1/completions", *MEDIA_PATHS)


def document(*paths: str) -> bytes:
    return msgspec.json.encode(
        {"openapi": "3.1.0", "paths": {path: {"post": {}} for path in paths}}
    )


def facts(models: Any = MODELS, metrics: str = METRICS, paths: tuple[str, ...] = ()) -> VllmFacts:
    given = document(*paths, "/health") if paths else b""
    return read_facts(msgspec.json.encode(models), metrics, given)


def test_facts_of_a_vllm() -> None:
    offer = ModelOffer(
        root="/models/m30", names=("served",), max_model_tokens=2048, paths=GENERATING
    )
    assert facts(paths=GENERATING) == VllmFacts(offer, 32, 8192)
    assert facts().offer.paths == ALL_PATHS, "it does not tell"
    off = METRICS.replace("{", '{enable_prefix_caching="False",')
    assert not facts(metrics=off).caches_prefixes


def test_a_model_may_have_several_names_and_adapters() -> None:
    base = {"root": "/m", "max_model_len": 64}
    listed = [
        {"id": "a", **base},
        {"id": "b", **base},
        {"id": "poet", "root": "/adapters/poet", "parent": "a"},
    ]
    offer = facts({"data": listed}).offer
    assert offer.names == ("a", "b")
    assert offer.adapters == (OfferedAdapter(name="poet", root="/adapters/poet"),)


def test_an_encoder_has_no_blocks_and_a_server_that_generates_must() -> None:
    none = METRICS.replace('"8192"', '"None"')
    encoder = facts(metrics=none, paths=("/v1/embeddings",))
    assert not encoder.caches_prefixes
    assert encoder.num_blocks * encoder.block_tokens >= 2048
    with pytest.raises(DialectError, match="num_gpu_blocks"):
        facts(metrics=none, paths=GENERATING)


@pytest.mark.parametrize(
    ("models", "metrics", "says"),
    [
        (MODELS, "", "cache_config_info"),
        ({"data": []}, METRICS, "max_model_len"),
        ({"data": [{"id": "x"}]}, METRICS, "max_model_len"),
        ({"object": "error"}, METRICS, "/v1/models"),
    ],
)
def test_what_is_no_vllm_is_one_line(models: Any, metrics: str, says: str) -> None:
    with pytest.raises(DialectError, match=says) as raised:
        facts(models, metrics)
    assert "\n" not in str(raised.value)


def test_a_server_that_computes_nothing_here_is_one_line() -> None:
    with pytest.raises(DialectError, match="neither completions nor embeddings"):
        facts(paths=("/v1/audio/transcriptions",))


def test_hits_of_all_engines_are_summed() -> None:
    text = """vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 2e2
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 30.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 40.0
vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.7e9
"""
    assert read_counts(text) == PrefixCounts(300.0, 70.0)
    fetched = 'vllm:external_prefix_cache_hits_total{engine="0"} 9.0\n'
    assert read_counts(text + fetched) == PrefixCounts(300.0, 70.0, 9.0)
    assert read_counts("") is None
    assert read_counts(text.replace("2e2", "many")) is None


def test_blocks_are_of_one_rank_or_of_all() -> None:
    line = 'vllm:cache_config_info{{block_size="16",engine="{}",num_gpu_blocks="{}"}} 1.0\n'
    metrics = line.format(0, 100) + line.format(1, 60)
    blocks = [
        read_facts(msgspec.json.encode(MODELS), metrics, rank=rank).num_blocks
        for rank in (0, 1, None)
    ]
    assert blocks == [100, 60, 160]
    with pytest.raises(DialectError, match="no data-parallel rank 2, but 2, which"):
        read_facts(msgspec.json.encode(MODELS), metrics, rank=2)
    second = line.format(8, 100) + line.format(9, 60) + line.format(10, 40)
    at_second = [read_facts(msgspec.json.encode(MODELS), second, rank=n) for n in range(3)]
    assert [one.num_blocks for one in at_second] == [100, 60, 40], "of the second machine"
    assert {one.num_ranks for one in at_second} == {3}
    older = read_facts(msgspec.json.encode(MODELS), METRICS, rank=3)
    assert older.num_blocks == 8192, "it does not tell which ranks it has"


def test_counts_are_of_one_rank_or_of_all() -> None:
    metrics = "".join(
        f'vllm:prefix_cache_{name}_total{{engine="{rank}",model_name="m"}} {count + rank}\n'
        for name, count in (("queries", 100.0), ("hits", 10.0))
        for rank in (0, 1)
    )
    assert read_counts(metrics) == PrefixCounts(201.0, 21.0, 0.0)
    assert read_counts(metrics, 1) == PrefixCounts(101.0, 11.0, 0.0)
    assert read_counts(metrics, 2) is None
    named = "".join(f'vllm:cache_config_info{{engine="{n}"}} 1.0\n' for n in (1, 4))
    counted = metrics.replace('engine="1"', 'engine="4"').replace('engine="0"', 'engine="1"')
    assert read_counts(named + counted, 1) == PrefixCounts(101.0, 11.0, 0.0)
