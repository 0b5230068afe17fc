"""Tests the catalogue: built in, changed and extended by configuration, with clear errors."""

from __future__ import annotations

import math

import pytest

from moonpool.config.tables import ConfigError
from moonpool.sim.hardware.catalogue import BUILT_IN, parse_catalogue
from moonpool.sim.hardware.roofline import RooflineCost


def test_built_in_devices_are_plausible() -> None:
    names = [device.name for device in BUILT_IN.devices]
    assert len(set(names)) == len(names) == 16
    for device in BUILT_IN.devices:
        assert 1e14 < device.peak_flops_per_s < 3e15
        assert 5e11 < device.memory_bytes_per_s < 9e12
        assert device.source
        assert [row.num_devices for row in device.all_reduce][:3] == [2, 4, 8]
        rates = [row.bytes_per_s for row in device.all_reduce]
        assert device.name.startswith("MI3") or rates == sorted(rates, reverse=True)
        if device.price is not None:
            assert 0.1 < device.price.usd_per_h < 20
            assert device.price.date.startswith("20") and device.price.source


def test_an_entry_is_changed_key_by_key() -> None:
    catalogue = parse_catalogue("""
        [devices.H100-SXM]
        price = { usd_per_h = 2.1, date = 2026-11-01, source = "contract" }
        gemm.flops_share = 0.7
    """)
    old, new = BUILT_IN.device("H100-SXM"), catalogue.device("H100-SXM")
    assert new.price is not None
    assert (new.price.usd_per_h, new.price.date) == (2.1, "2026-11-01")
    assert new.gemm.flops_share == 0.7
    assert new.gemm.bandwidth_share == old.gemm.bandwidth_share
    assert new.memory_bytes_per_s == old.memory_bytes_per_s
    assert catalogue.device("H200") == BUILT_IN.device("H200")
    assert old.gemm.flops_share == 0.74, "the built-in catalogue is a value"


def test_entries_are_added_like_others() -> None:
    catalogue = parse_catalogue("""
        [devices.C200]
        like = "H200"
        peak_flops_per_s = 2.25e15
        [devices.B300]
        like = "C200"
        [shapes.mine]
        like = "llama3-70b"
        layers = 40
    """)
    assert catalogue.device("B300").peak_flops_per_s == 2.25e15
    assert catalogue.device("C200").memory_bytes_per_s == 4800e9
    assert catalogue.shape("mine").layers == 40
    assert catalogue.shape("mine").hidden == 8192
    cost = RooflineCost(catalogue.device("B300"), catalogue.shape("mine"), 4)
    assert cost.step_s((), 1, 100) > 0
    assert len(catalogue.devices) == len(BUILT_IN.devices) + 2


def test_a_whole_shape_can_be_given() -> None:
    catalogue = parse_catalogue("""
        [shapes.tiny]
        layers = 2
        hidden = 64
        heads = 4
        kv_heads = 2
        head_dim = 16
        ffn = 128
        vocab = 1000
        bytes_per_weight = 0.5
    """)
    assert catalogue.shape("tiny").weight_bytes == catalogue.shape("tiny").params / 2
    assert parse_catalogue("") == BUILT_IN


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[devices", "not valid TOML"),
        ("[device.X]", r"unknown table \[device\].*did you mean 'devices'"),
        ("devices = 3", "one table for each name"),
        ("[devices]\nX = 3", "one table for each name"),
        ("[devices.H100-SXM]\nflops = 1", "unknown key flops .*did you mean"),
        ("[devices.H1OO-SXM]\npeak_flops_per_s = 1e15", "is new and lacks .*'H100-SXM'"),
        ("[devices.X]\nlike = 'H10'", r"unknown `like` of \[devices.X\] 'H10'; did you mean 'H"),
        ("[devices.A40]\npeak_flops_per_s = 'fast'", r"\[devices.A40\]: Expected `float`"),
        ("[devices.A40]\npeak_flops_per_s = nan", "must be a positive number"),
        ("[devices.A40]\nmemory_bytes_per_s = -1.0", "must be a positive number"),
        ("[devices.A40]\nmemory_bytes = 0", "must be a positive number"),
        (f"[devices.A40]\nmemory_bytes = 1{'0' * 400}", "must be a positive number"),
        ("[devices.A40]\ngemm.flops_share = 1.5", "at most 1, not 1.5"),
        ("[devices.A40]\ngemm.sharpness = 3", "1, 2, 4 or 8, not 3"),
        ("[devices.A40]\ngemm.tile = 3", "`gemm`|unknown field"),
        ("[shapes.llama3-8b]\nlayers = 0", "must be a positive number"),
        ("[shapes.llama3-8b]\nlayers = 1.5", "Expected `int`"),
        ("[devices.X]\nlike = 3", "unknown .* '3'"),
    ],
)
def test_mistakes_get_one_clear_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        parse_catalogue(text)
    assert "\n" not in str(error.value)


def test_unknown_names_get_the_nearest_known() -> None:
    with pytest.raises(ConfigError, match="unknown device 'h100-sxm'; did you mean 'H100-SXM'"):
        BUILT_IN.device("h100-sxm")
    with pytest.raises(ConfigError, match="unknown model shape 'llama-3-70b'; did you mean 'llama"):
        BUILT_IN.shape("llama-3-70b")
    with pytest.raises(ConfigError, match=r"' or '.*'\? \(--catalogue FILE adds others\)"):
        BUILT_IN.shape("llama")
    with pytest.raises(ConfigError, match=r"known are .*llama3-8b"):
        BUILT_IN.shape("@")
    assert math.isfinite(BUILT_IN.device("A10").memory_bytes)


def test_the_built_in_figures_are_exact() -> None:
    """The values must be equal to the last bit, because simulated figures follow from them."""
    assert [device.name for device in BUILT_IN.devices[:3]] == ["A100-SXM", "A100-PCIE", "A800-SXM"]
    assert len(BUILT_IN.devices) == 16 and len(BUILT_IN.shapes) == 27
    a800 = BUILT_IN.device("A800-SXM")
    assert [(row.alpha_s, row.bytes_per_s) for row in a800.all_reduce] == [
        (43 * 1e-6, 0.55 * 200e9 * 2 / 2),
        (47 * 1e-6, 0.55 * 200e9 * 4 / 6),
        (51 * 1e-6, 0.55 * 200e9 * 8 / 14),
    ]
    h100, h200 = BUILT_IN.device("H100-SXM"), BUILT_IN.device("H200")
    assert h200.memory_bytes == 141 * 10**9 and h200.all_reduce == h100.all_reduce
    assert (h200.gemm.tile_tokens, h200.gemm.sharpness, h200.attention.launch_s) == (32, 4, 9.5e-6)
    assert BUILT_IN.device("A40").memory_bytes == 46068 << 20
    assert BUILT_IN.device("A6000").price is None
    assert BUILT_IN.shape("llama3-70b").params == 70_552_387_584
