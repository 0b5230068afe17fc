"""Tests the roofline of mixtures, latents and windows."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.config.tables import (
    Config,
    ConfigError,
    HardwareConfig,
    ModelConfig,
    Quantization,
)
from moonpool.cost.model import Chunk
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.hardware.catalogue import BUILT_IN, parse_catalogue
from moonpool.sim.hardware.model_shapes import in_formats
from moonpool.sim.hardware.node_cost import kv_capacity_tokens
from moonpool.sim.hardware.roofline import RooflineCost, power
from moonpool.studies.cluster import cluster_config

H200 = BUILT_IN.device("H200")
NAMES = ("deepseek-v3", "qwen3-30b-a3b", "gpt-oss-120b", "llama4-maverick")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [1, 7, 300])
def test_parts_sum_to_the_step(name: str, batch: int) -> None:
    cost = RooflineCost(H200, BUILT_IN.shape(name), 8)
    chunks = [Chunk(500, 40, 0, True), Chunk(3000, 20_000, 0, False)]
    for step in (((), batch, 900 * batch), (chunks, batch, 900 * batch), (chunks, 0, 0)):
        assert cost.step_parts(*step).step_s == pytest.approx(cost.step_s(*step), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_several_decode_steps_are_the_sum_of_single_ones(name: str) -> None:
    cost = RooflineCost(H200, BUILT_IN.shape(name), 8)
    for context in (90, 127, 4000, 8100):
        single = sum(cost.step_s((), 6, 6 * (context + i)) for i in range(200))
        assert cost.decode_steps_s(6, 6 * context, 200) == pytest.approx(single, rel=1e-9)


def test_experts_touched_grow_from_one_token_to_all() -> None:
    shape = BUILT_IN.shape("qwen3-30b-a3b")
    experts = RooflineCost(H200, shape, 1).experts
    assert experts is not None
    assert experts.touched(1)[0] == pytest.approx(8)
    assert experts.touched(10_000)[0] == pytest.approx(128)
    assert 8 < experts.touched(8)[0] < 64
    shared = RooflineCost(H200, shape, 8).experts
    assert shared is not None
    assert 1 < shared.touched(1)[0] < 3, "the fullest of eight devices has more than the mean"
    assert shared.touched(10_000)[0] == 16


def test_a_decode_reads_the_active_weights_and_the_windows() -> None:
    device = msgspec.structs.replace(
        H200, gemm=msgspec.structs.replace(H200.gemm, launch_s=0.0, bandwidth_share=1.0)
    )
    shape = BUILT_IN.shape("gpt-oss-120b")
    cost = RooflineCost(device, shape, 1, engine_overhead_s=0.0)
    active = shape.layers * 3 * shape.hidden * 2880 * 4 * 0.53125
    experts_s = cost.step_parts((), 1, 4000).parts["experts"]
    # whole tiles cost the rest
    assert 1.0 < experts_s / (active / device.memory_bytes_per_s) < 1.15
    full = RooflineCost(device, msgspec.structs.replace(shape, window=0), 1)
    windowed_s = cost.step_parts((), 32, 32 * 8000).parts["attention_decode"]
    assert windowed_s == pytest.approx(
        full.step_parts((), 32, 32 * 8000).parts["attention_decode"] * (0.5 + 0.5 * 128 / 8000)
    )


def test_a_chunk_counts_the_pairs_inside_the_window() -> None:
    cost = RooflineCost(H200, msgspec.structs.replace(BUILT_IN.shape("gpt-oss-20b"), full_every=0))
    for start, new in ((0, 100), (0, 500), (100, 60), (5000, 10)):
        pairs = sum(min(start + i + 1, 128) for i in range(new))
        seen_s = cost.chunk_limits(Chunk(new, start, start, True))[0]
        assert seen_s == pytest.approx(cost.key_compute_s * pairs)


def test_each_device_holds_the_latent() -> None:
    shape = BUILT_IN.shape("deepseek-v3")
    usable = 0.9 * 8 * H200.memory_bytes - shape.weight_bytes
    assert kv_capacity_tokens(H200, shape, 8) == int(usable / shape.kv_bytes_per_token) // 8


def test_eight_bit_weights_and_kv_halve_their_bytes() -> None:
    catalogue = parse_catalogue("""
        [shapes.half]
        like = "qwen3-235b-a22b"
        bytes_per_weight = 1.0
        bytes_per_kv = 1.0
    """)
    whole, half = BUILT_IN.shape("qwen3-235b-a22b"), catalogue.shape("half")
    assert half.weight_bytes == whole.weight_bytes / 2
    hardware = HardwareConfig(device="H200", shape="half", devices_per_node=8, cost="roofline")
    layout = build_hardware(Config(hardware=hardware), catalogue=catalogue).layout
    assert layout.token_bytes == half.kv_bytes_per_token == whole.kv_bytes_per_token / 2


@pytest.mark.parametrize("shape", ["llama3-70b", "deepseek-v3", "gpt-oss-120b"])
def test_fp8_kvcache_has_the_blocks_of_the_engine(shape: str) -> None:
    hardware = HardwareConfig(device="H200", shape=shape, devices_per_node=8, cost="roofline")
    plain = build_hardware(Config(hardware=hardware))
    fp8 = build_hardware(Config(hardware=hardware, model=ModelConfig(kv_cache_dtype="fp8")))
    own = BUILT_IN.shape(shape)
    halves = 1 if own.latent else 2
    assert fp8.layout.token_bytes == own.layers * halves * own.kv_heads * (own.head_dim + 1)
    gained = fp8.decode.engine_tokens / plain.decode.engine_tokens
    assert gained == pytest.approx(plain.layout.token_bytes / fp8.layout.token_bytes, rel=1e-4)
    assert fp8.layout.fingerprint != plain.layout.fingerprint
    kv_s = [node.decode.ground_truth.step_s((), 1, 10**6) for node in (plain, fp8)]
    assert kv_s[1] < kv_s[0]


def test_weights_in_four_and_eight_bits() -> None:
    """A decode reads fewer bytes, so it is faster; a prefill is faster only if the device
    multiplies in FP8."""
    shape, chunk = BUILT_IN.shape("llama3-70b"), Chunk(8192, 0, 0, True)

    def steps(device: str, quantization: Quantization) -> tuple[float, float]:
        stored = in_formats(shape, ModelConfig(quantization=quantization))
        cost = RooflineCost(BUILT_IN.device(device), stored, 8)
        return cost.step_s((), 1, 1000), cost.step_s((chunk,), 0, 0)

    for device, faster in (("H100-SXM", True), ("A100-SXM", False)):
        (decode_s, prefill_s), (fp8_decode_s, fp8_prefill_s) = (
            steps(device, "none"),
            steps(device, "fp8"),
        )
        int4_decode_s, int4_prefill_s = steps(device, "int4")
        assert max(int4_decode_s, fp8_decode_s) < 0.95 * decode_s
        assert int4_prefill_s == pytest.approx(prefill_s, rel=0.01)
        assert (fp8_prefill_s < 0.8 * prefill_s) == faster
        assert fp8_prefill_s < prefill_s * 1.001


def test_requests_hold_the_window_where_all_layers_have_one() -> None:
    catalogue = parse_catalogue("""
        [shapes.sliding]
        like = "mistral-7b"
        window = 4096
    """)
    for shape, kept in (("sliding", 4096), ("gpt-oss-20b", 0), ("mistral-7b", 0)):
        hardware = HardwareConfig(device="H200", shape=shape, devices_per_node=1, cost="roofline")
        built = build_hardware(Config(hardware=hardware), catalogue=catalogue)
        assert built.decode.kept_tokens == built.prefill.kept_tokens == kept


def test_a_measured_node_has_no_other_formats() -> None:
    config = Config(model=ModelConfig(quantization="int4"))
    with pytest.raises(ConfigError, match="measured with bfloat16"):
        build_hardware(config)
    assert cluster_config(None, {"model": {"quantization": "int4"}}).hardware.cost == "roofline"


def test_a_power_by_multiplications() -> None:
    assert power(0.9, 0) == 1.0
    assert power(0.9, 37) == pytest.approx(0.9**37)
