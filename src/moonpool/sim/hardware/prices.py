"""Computes a cluster's price per hour, from its devices and its KVCache pool's DRAM and SSD.

The price of a device includes its share of the node, but not the DRAM and SSD of the pool. The
built-in prices are dated list prices (`catalogue.toml`, `prices.toml`). A file given with
`--prices` is laid over them:

[devices]                          # USD per hour and device
H100-SXM = 2.1
A800-SXM = { usd_per_h = 1.2, date = "2026-11", source = "our contract" }

[dram]
usd_per_gb_h = 0.002

[ssd]
usd_per_gb_h = 0.0001
"""

from __future__ import annotations

import math
import tomllib
from typing import Any

import msgspec

from moonpool.config.schema import BAD_TOML
from moonpool.config.tables import ConfigError
from moonpool.sim.hardware.catalogue import BUILT_IN, Catalogue, nearest, package_text
from moonpool.sim.hardware.devices import Price
from moonpool.types import Struct

GB = 10**9
_TABLES = ("devices", "dram", "ssd")


class Prices(Struct, frozen=True):
    """Prices by device name, and the prices of one GB of DRAM and of SSD."""

    devices: dict[str, Price]
    dram: Price
    ssd: Price

    def node_usd_per_h(self, device: str, num_devices: int) -> float:
        """Returns the node's price per hour. Raises ConfigError if the device has no price."""
        price = self.devices.get(device)
        if price is None:
            raise ConfigError(
                f"there is no price of {device}: give one by --prices FILE, a TOML file with the"
                f" table [devices] and a line {device} = US dollars per hour and device"
            )
        return price.usd_per_h * num_devices

    def dram_usd_per_h(self, num_bytes: float) -> float:
        """Dollars per hour for `num_bytes` of DRAM."""
        return num_bytes / GB * self.dram.usd_per_h

    def ssd_usd_per_h(self, num_bytes: float) -> float:
        """Dollars per hour for `num_bytes` of SSD."""
        return num_bytes / GB * self.ssd.usd_per_h


def parse_prices(text: str = "", catalogue: Catalogue = BUILT_IN) -> Prices:
    """Returns the built-in prices, overlaid by those of the TOML text. Raises ConfigError."""
    try:
        tables = tomllib.loads(text)
    except BAD_TOML as error:
        raise ConfigError(f"the price file is not valid TOML: {error}") from None
    for table, entries in tables.items():
        if table not in _TABLES:
            known = nearest(table, _TABLES)
            raise ConfigError(f"unknown table [{table}] in the price file{known}")
        if not isinstance(entries, dict):
            raise ConfigError(f"[{table}] of the price file must be a table")
    devices = {device.name: device.price for device in catalogue.devices if device.price}
    for name, given in tables.get("devices", {}).items():
        catalogue.device(name)
        devices[name] = _price(given, f"devices.{name}", "usd_per_h")
    built_in = tomllib.loads(package_text("prices.toml"))
    dram, ssd = (
        _price(tables.get(name, built_in[name]), name, "usd_per_gb_h") for name in ("dram", "ssd")
    )
    return Prices(devices, dram, ssd)


def _price(given: Any, place: str, key: str) -> Price:
    entries = given if isinstance(given, dict) else {key: given}
    for name in entries:
        if name not in (key, "date", "source"):
            known = nearest(name, (key, "date", "source"))
            raise ConfigError(f"unknown key {place}.{name} in the price file{known}")
    amount = entries.get(key)
    if isinstance(amount, bool) or not isinstance(amount, int | float):
        raise ConfigError(f"{place} of the price file needs {key}, a number of US dollars")
    if not (math.isfinite(amount) and amount >= 0):
        raise ConfigError(f"{place} of the price file must be 0 or more, not {amount}")
    texts = {name: str(entries[name]) for name in ("date", "source") if name in entries}
    price = Price(usd_per_h=float(amount), date="", source="the price file")
    return msgspec.structs.replace(price, **texts)
