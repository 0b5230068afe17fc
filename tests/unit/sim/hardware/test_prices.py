"""Tests prices: the catalogue's, a buyer's own, and one line for every mistake."""

from __future__ import annotations

import pytest

from moonpool.config.tables import ConfigError
from moonpool.sim.hardware.prices import parse_prices


def test_the_catalogue_s_prices_hold_unless_others_are_given() -> None:
    own = """
        [devices]
        H100-SXM = 2.0
        A800-SXM = { usd_per_h = 1.2, date = 2026-11-01, source = "our contract" }
        [dram]
        usd_per_gb_h = 0.001
        [ssd]
        usd_per_gb_h = 0.0002
    """
    prices = parse_prices(own)
    assert prices.node_usd_per_h("H100-SXM", 8) == 16.0
    assert prices.devices["A800-SXM"].source == "our contract"
    assert prices.devices["A800-SXM"].date == "2026-11-01"
    assert prices.dram_usd_per_h(2e12) == pytest.approx(2.0)
    assert prices.node_usd_per_h("H200", 1) == parse_prices().node_usd_per_h("H200", 1) == 4.5
    assert prices.ssd_usd_per_h(1e13) == pytest.approx(2.0)
    assert 0 < parse_prices().ssd.usd_per_h < parse_prices().dram.usd_per_h


def test_a_device_without_a_price_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no price of A6000: give one by --prices"):
        parse_prices().node_usd_per_h("A6000", 4)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[devices", "not valid TOML"),
        ("[device]\nH100-SXM = 1", r"unknown table \[device\].*did you mean 'devices'"),
        ("dram = 1", r"\[dram\] of the price file must be a table"),
        ("[devices]\nH100 = 1", "unknown device 'H100'; did you mean"),
        ("[devices]\nH100-SXM = 'much'", "devices.H100-SXM of the price file needs usd_per_h"),
        ("[devices]\nH100-SXM = true", "needs usd_per_h"),
        ("[devices]\nH100-SXM = -1", "must be 0 or more, not -1"),
        ("[devices]\nH100-SXM = nan", "must be 0 or more"),
        ("[devices]\nH100-SXM = { usd = 1 }", "unknown key devices.H100-SXM.usd.*usd_per_h"),
        ("[dram]\nusd_per_h = 1", "unknown key dram.usd_per_h .*did you mean 'usd_per_gb_h'"),
        ("[sdd]\nusd_per_gb_h = 1", r"unknown table \[sdd\].*did you mean 'ssd'"),
        ("[dram]", "dram of the price file needs usd_per_gb_h"),
    ],
)
def test_mistakes_are_one_line(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        parse_prices(text)
    assert "\n" not in str(caught.value)
