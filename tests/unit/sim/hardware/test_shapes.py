"""Model shapes give the published sizes."""

from __future__ import annotations

import pytest

from moonpool.sim.hardware.catalogue import BUILT_IN

BILLIONS_OF_PARAMETERS = {
    "llama3-8b": 8.03,
    "llama3-70b": 70.55,
    "llama2-13b": 13.02,
    "llama2-70b": 68.98,
    "llama-33b": 32.53,
    "llama-65b": 65.29,
    "mistral-7b": 7.24,
    "yi-34b": 34.39,
    "qwen2.5-7b": 7.62,
    "qwen2.5-32b": 32.76,
    "qwen2.5-72b": 72.71,
    "falcon-180b": 179.5,
    "gpt3-175b": 174.6,
    "opt-13b": 12.85,
    "opt-66b": 65.72,
}
KV_BYTES_PER_TOKEN = {
    "llama3-8b": 131_072,
    "llama3-70b": 327_680,
    "llama2-13b": 819_200,
    "llama-33b": 1_597_440,
    "llama-65b": 2_621_440,
    "yi-34b": 245_760,
}


# Billions of parameters in all and per token, gigabytes as published checkpoints have them, and
# bytes of KVCache per token.
MIXTURES = {
    "deepseek-v3": (671, 37, 671, 70_272),
    "kimi-k2": (1026, 32.5, 1026, 70_272),
    "qwen3-30b-a3b": (30.5, 3.3, 61, 98_304),
    "qwen3-235b-a22b": (235, 22, 470, 192_512),
    "gpt-oss-20b": (20.9, 4.2, 13.8, 49_152),  # 3.6 without the embedding
    "gpt-oss-120b": (116.8, 5.7, 65.2, 73_728),  # 5.1 without the embedding
    "llama4-scout": (107.8, 17.2, 215.5, 196_608),  # of 109, 1.2 are for images
    "llama4-maverick": (400.7, 17.2, 801.4, 196_608),
}


def test_every_shape_is_checked_and_named_once() -> None:
    checked = [*BILLIONS_OF_PARAMETERS, *MIXTURES]
    assert sorted(checked) == sorted(shape.name for shape in BUILT_IN.shapes)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures(name: str) -> None:
    shape = BUILT_IN.shape(name)
    sizes = (shape.params / 1e9, shape.active_params / 1e9, shape.weight_bytes / 1e9)
    assert sizes == pytest.approx(MIXTURES[name][:3], rel=0.02)
    assert shape.kv_bytes_per_token == MIXTURES[name][3]


@pytest.mark.parametrize("name", BILLIONS_OF_PARAMETERS)
def test_parameters(name: str) -> None:
    printed = BILLIONS_OF_PARAMETERS[name] * 1e9
    assert BUILT_IN.shape(name).params == pytest.approx(printed, rel=0.006)
    assert BUILT_IN.shape(name).weight_bytes == 2 * BUILT_IN.shape(name).params


@pytest.mark.parametrize("name", KV_BYTES_PER_TOKEN)
def test_kv_bytes(name: str) -> None:
    assert BUILT_IN.shape(name).kv_bytes_per_token == KV_BYTES_PER_TOKEN[name]
