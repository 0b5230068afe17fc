"""Tests the draft model of simulated hardware: its time, its memory, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.config.parse import parse_config
from moonpool.config.tables import Config, ConfigError
from moonpool.cost.fitted import FittedCost
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import Hardware, build_hardware
from moonpool.sim.hardware.catalogue import BUILT_IN
from moonpool.sim.hardware.draft_cost import ROUND_OVERHEAD_S
from moonpool.sim.hardware.node_cost import MEMORY_SHARE

A800 = BUILT_IN.device("A800-SXM")
SMALL, LARGE = BUILT_IN.shape("llama3.2-1b"), BUILT_IN.shape("llama3-70b")


def config(model: str = "llama3.2-1b", hardware: Any = None, **settings: Any) -> Config:
    drafts = {"method": "draft_model", "model": model, **settings}
    tables: dict[str, Any] = {"engine": {"speculative_config": drafts}}
    return parse_config("", tables | {"hardware": hardware or {}}, DEFAULTS)


def plain(hardware: Any = None) -> Hardware:
    return build_hardware(parse_config("", {"hardware": hardware or {}}, DEFAULTS))


def test_a_guess_is_a_decode_step_of_the_small_shape_on_one_device() -> None:
    draft = build_hardware(config()).decode.draft
    assert draft is not None
    one_s = draft.ground_truth.step_s((), 1, 1000)
    weights_s = SMALL.weight_bytes / (A800.gemm.bandwidth_share * A800.memory_bytes_per_s)
    assert weights_s + ROUND_OVERHEAD_S < one_s < weights_s + 3 * ROUND_OVERHEAD_S
    for batch, context in ((1, 1000), (16, 64_000), (64, 64_000)):
        expected = draft.ground_truth.step_s((), batch, context)
        assert draft.place.cost.decode_step_s(batch, context) == pytest.approx(expected, rel=0.25)


def test_its_weights_and_kvcache_leave_the_model_less_of_every_device() -> None:
    found, before = build_hardware(config(draft_kv_tokens=50_000)), plain()
    draft = found.decode.draft
    assert draft is not None and draft.place.num_blocks == -(-50_000 // 256)
    taken = SMALL.weight_bytes + draft.place.num_blocks * 256 * SMALL.kv_bytes_per_token
    usable = 8 * (MEMORY_SHARE * A800.memory_bytes - taken) - LARGE.weight_bytes
    assert found.decode.engine_tokens == int(usable / LARGE.kv_bytes_per_token)
    assert found.decode.engine_tokens < before.decode.engine_tokens
    assert found.mixed.engine_tokens == found.decode.engine_tokens
    assert found.prefill.engine_tokens == before.prefill.engine_tokens
    assert found.prefill.draft is None and found.mixed.draft is not None
    assert found.mixed.draft.place == draft.place


def test_its_kvcache_has_an_eighth_of_what_its_device_has_left() -> None:
    draft = build_hardware(config()).decode.draft
    assert draft is not None
    room = MEMORY_SHARE * A800.memory_bytes - LARGE.weight_bytes / 8 - SMALL.weight_bytes
    tokens = draft.place.num_blocks * draft.place.block_tokens
    assert tokens * SMALL.kv_bytes_per_token == pytest.approx(room / 8, rel=0.01)
    assert draft.place.max_positions == 131_072


def test_int4_weights_take_less_time_and_memory() -> None:
    full, small = (build_hardware(config(quantization=q)).decode for q in ("none", "int4"))
    assert full.draft is not None and small.draft is not None
    times = [draft.ground_truth.step_s((), 1, 0) for draft in (full.draft, small.draft)]
    assert times[1] < times[0] and small.engine_tokens > full.engine_tokens


def test_attention_devices_keep_their_kvcache() -> None:
    devices = {"cost": "roofline", "attention_device": "H20", "attention_devices_per_node": 8}
    found, before = build_hardware(config(hardware=devices)), plain(devices)
    assert found.decode.draft is not None
    assert found.decode.engine_tokens == before.decode.engine_tokens


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config("llama3.2-1"), "unknown model shape 'llama3.2-1'; did you mean 'llama3.2-1b'"),
        (config("qwen2.5-0.5b"), "151,936 tokens and llama3-70b 128,256, so their tokenizers"),
        (config("llama3-70b"), "llama3-70b and its KVCache need 141.* GB of a device"),
        (config(draft_kv_tokens=4_000_000), "use more devices, a smaller draft model or fewer"),
    ],
)
def test_what_cannot_be_is_refused(given: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_hardware(given)


def test_a_measured_machine_has_no_draft_model() -> None:
    profile = FittedCost(prefill=(0.5, 0.001, 1e-7, 2e-7), decode=(0.02, 0.001, 1e-6))
    with pytest.raises(ConfigError, match=r"mine\.json has no step times of a draft model"):
        build_hardware(config(hardware={"cost": "mine.json"}), profile)
