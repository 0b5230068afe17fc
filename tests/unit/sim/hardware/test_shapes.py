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


def test_every_shape_is_checked_and_named_once() -> None:
    assert sorted(BILLIONS_OF_PARAMETERS) == sorted(shape.name for shape in BUILT_IN.shapes)


@pytest.mark.parametrize("name", BILLIONS_OF_PARAMETERS)
def test_parameters(name: str) -> None:
    printed = BILLIONS_OF_PARAMETERS[name] * 1e9
    assert BUILT_IN.shape(name).params == pytest.approx(printed, rel=0.006)
    assert BUILT_IN.shape(name).weight_bytes == 2 * BUILT_IN.shape(name).params


@pytest.mark.parametrize("name", KV_BYTES_PER_TOKEN)
def test_kv_bytes(name: str) -> None:
    assert BUILT_IN.shape(name).kv_bytes_per_token == KV_BYTES_PER_TOKEN[name]
