"""Tests that model shapes give the published sizes."""

from __future__ import annotations

import pytest

from moonpool.config.tables import ModelConfig, Quantization
from moonpool.sim.hardware.catalogue import BUILT_IN
from moonpool.sim.hardware.model_shapes import in_formats

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
    "qwen2.5-0.5b": 0.494,
    "llama3.2-1b": 1.236,
    "gemma3-12b": 11.77,
    "gemma3-27b": 27.01,
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
    "qwen2.5-0.5b": 12_288,
    "llama3.2-1b": 32_768,
}


# The columns are billions of parameters in total and per token, gigabytes as published checkpoints
# have them, and bytes of KVCache per token.
MIXTURES = {
    "deepseek-v3": (671, 37, 671, 70_272),
    "kimi-k2": (1026, 32.5, 1026, 70_272),
    "qwen3-30b-a3b": (30.5, 3.3, 61, 98_304),
    "qwen3-235b-a22b": (235, 22, 470, 192_512),
    "gpt-oss-20b": (20.9, 4.2, 13.8, 49_152),  # 3.6B active parameters without the embedding
    "gpt-oss-120b": (116.8, 5.7, 65.2, 73_728),  # 5.1B active parameters without the embedding
    "llama4-scout": (107.8, 17.2, 215.5, 196_608),  # of the model's 109B, 1.2B are for images
    "llama4-maverick": (400.7, 17.2, 801.4, 196_608),
}


# The values were computed by hand from the published configurations: bytes of the weights that a
# token uses, and of its KVCache in FP8, whose scales take a byte per head for each of K and V.
ACTIVE_AND_FP8_BYTES = {
    "deepseek-v3": (37_551_276_032, 61 * 577),
    "kimi-k2": (32_860_471_296, 61 * 577),
    "qwen3-30b-a3b": (2 * 3_352_821_760, 48 * 2 * 4 * 129),
    "qwen3-235b-a22b": (44_379_930_624, 94 * 2 * 4 * 129),
    "gpt-oss-20b": (4_864_020_480, 24 * 2 * 8 * 65),
    "gpt-oss-120b": (6_157_670_400, 36 * 2 * 8 * 65),
    "llama4-scout": (34_344_796_160, 48 * 2 * 8 * 129),
    "llama4-maverick": (34_368_389_120, 48 * 2 * 8 * 129),
    "llama3-70b": (2 * 70_552_387_584, 80 * 2 * 8 * 129),
}


@pytest.mark.parametrize("name", ACTIVE_AND_FP8_BYTES)
def test_active_bytes_and_fp8_kvcache(name: str) -> None:
    shape = BUILT_IN.shape(name)
    active, kv = ACTIVE_AND_FP8_BYTES[name]
    assert shape.active_weight_bytes == active
    in_fp8 = in_formats(shape, ModelConfig(kv_cache_dtype="fp8"))
    assert in_fp8.kv_bytes_per_token == pytest.approx(kv, rel=1e-12)
    assert in_fp8.weight_bytes == shape.weight_bytes


@pytest.mark.parametrize(
    ("name", "quantization", "active"),
    [
        # The linears have 5, 8.125 and 8 bits; embedding and LM head keep their format.
        ("qwen3-30b-a3b", "int4", 0.625 * 2_730_491_904 + 2 * 622_329_856),
        ("qwen3-30b-a3b", "int8", (1 + 1 / 64) * 2_730_491_904 + 2 * 622_329_856),
        ("llama3-70b", "fp8", 68_451_041_280 + 2 * 2_101_346_304),
        ("deepseek-v3", "fp8", 37_551_276_032),
        ("deepseek-v3", "int4", 0.625 * 35_697_917_952 + 1_853_358_080),
        # MXFP4 experts keep their format.
        (
            "gpt-oss-120b",
            "int4",
            0.625 * 968_785_920 + 0.53125 * 3_583_180_800 + 2 * 1_158_266_880,
        ),
    ],
)
def test_active_bytes_of_quantized_weights(
    name: str, quantization: Quantization, active: float
) -> None:
    shape = in_formats(BUILT_IN.shape(name), ModelConfig(quantization=quantization))
    assert shape.active_weight_bytes == pytest.approx(active, rel=1e-12)
    assert shape.active_params == BUILT_IN.shape(name).active_params


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


def unseen_share(name: str, context_tokens: int) -> float:
    """Returns the share of a request's KVCache that no later token sees: the part before the
    window, in layers with a window. Blocks hold the KVCache of all layers as long as one layer sees
    all tokens."""
    shape = BUILT_IN.shape(name)
    return shape.windowed_share * max(1.0 - shape.window / context_tokens, 0.0)


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("gemma3-12b", (0.62, 0.78, 0.83)),
        ("gemma3-27b", (0.63, 0.79, 0.83)),
        ("gpt-oss-20b", (0.48, 0.50, 0.50)),
        ("gpt-oss-120b", (0.48, 0.50, 0.50)),
        ("llama4-scout", (0.0, 0.37, 0.70)),
        ("llama3-70b", (0.0, 0.0, 0.0)),
    ],
)
def test_what_whole_blocks_hold_in_vain(name: str, shares: tuple[float, ...]) -> None:
    """The decision on eviction rests on these figures."""
    found = [unseen_share(name, context) for context in (4096, 16_384, 131_072)]
    assert found == pytest.approx(shares, abs=0.01)
