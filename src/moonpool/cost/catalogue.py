"""The devices and model shapes known by name, and how configuration adds to them.

[devices.H100-SXM]                # changes one, table by table
price = { usd_per_h = 2.1, date = "2026-11", source = "our contract" }

[devices.B200]                    # adds one
like = "H200"
peak_flops_per_s = 2.25e15

[shapes.my-model]
like = "llama3-70b"
layers = 40
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from moonpool.config import ConfigError
from moonpool.cost.hardware import DEVICES, Device
from moonpool.cost.roofline import soft_maximum
from moonpool.cost.shapes import SHAPES, ModelShape
from moonpool.types import Struct

Entry = TypeVar("Entry", Device, ModelShape)
MAY_BE_ZERO = {"nvlink_bytes_per_s", "launch_s", "alpha_s", "nic_latency_s", "usd_per_h"}


class Catalogue(Struct, frozen=True):
    devices: tuple[Device, ...]
    shapes: tuple[ModelShape, ...]

    def device(self, name: str) -> Device:
        """Raises ConfigError, naming the nearest known one."""
        return _find(self.devices, name, "device")

    def shape(self, name: str) -> ModelShape:
        """Raises ConfigError, naming the nearest known one."""
        return _find(self.shapes, name, "model shape")


BUILT_IN = Catalogue(devices=DEVICES, shapes=SHAPES)


def parse_catalogue(text: str, base: Catalogue = BUILT_IN) -> Catalogue:
    """`base` with the TOML text's additions and changes. Raises ConfigError."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the catalogue is not valid TOML: {error}") from None
    for table, entries in tables.items():
        if table not in ("devices", "shapes"):
            raise ConfigError(
                f"unknown table [{table}] in the catalogue{nearest(table, ('devices', 'shapes'))}"
            )
        if not (isinstance(entries, dict) and all(isinstance(e, dict) for e in entries.values())):
            raise ConfigError(f"[{table}] of the catalogue must hold one table for each name")
    return Catalogue(
        devices=_merge(base.devices, tables.get("devices", {}), Device, "devices"),
        shapes=_merge(base.shapes, tables.get("shapes", {}), ModelShape, "shapes"),
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a line about an unknown name."""
    known = list(known)
    close = difflib.get_close_matches(name.lower(), [k.lower() for k in known], n=1, cutoff=0.4)
    if close:
        return f"; did you mean {next(k for k in known if k.lower() == close[0])!r}?"
    return f"; known are {', '.join(known)}"


def _find(entries: tuple[Entry, ...], name: str, noun: str) -> Entry:
    for entry in entries:
        if entry.name == name:
            return entry
    raise ConfigError(f"unknown {noun} {name!r}{nearest(name, (e.name for e in entries))}")


def _merge(
    known: tuple[Entry, ...], tables: dict[str, Any], kind: type[Entry], table: str
) -> tuple[Entry, ...]:
    merged = {entry.name: entry for entry in known}
    for name, given in tables.items():
        place = f"[{table}.{name}]"
        keys = [f.name for f in msgspec.structs.fields(kind) if f.name != "name"] + ["like"]
        for key in given:
            if key not in keys:
                raise ConfigError(f"unknown key {key} in {place}{nearest(key, keys)}")
        changes = {key: value for key, value in given.items() if key != "like"}
        base: dict[str, Any] = {}
        if "like" in given:
            base = msgspec.to_builtins(
                _find(tuple(merged.values()), str(given["like"]), f"`like` of {place}")
            )
        elif name in merged:
            base = msgspec.to_builtins(merged[name])
        else:
            _check_complete(name, given, kind, place, merged)
        whole = _overlay(base, changes) | {"name": name}
        merged[name] = _checked(whole, kind, place)
    return tuple(merged.values())


def _check_complete(
    name: str, given: dict[str, Any], kind: type[Entry], place: str, known: Iterable[str]
) -> None:
    required = [field.name for field in msgspec.structs.fields(kind) if field.required]
    absent = [key for key in required if key != "name" and key not in given]
    if absent:
        raise ConfigError(
            f"{place} is new and lacks {', '.join(absent)}: give them, or the name of one that it "
            f"is like{nearest(name, known)}"
        )


def _overlay(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Tables within change key by key; everything else is replaced."""
    whole = dict(base)
    for key, value in changes.items():
        if hasattr(value, "isoformat"):  # an unquoted TOML date
            value = value.isoformat()
        inner = whole.get(key)
        if isinstance(value, dict):
            value = _overlay(inner if isinstance(inner, dict) else {}, value)
        whole[key] = value
    return whole


def _checked(whole: dict[str, Any], kind: type[Entry], place: str) -> Entry:
    try:
        entry = msgspec.convert(whole, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {error}") from None
    _check_numbers(msgspec.to_builtins(entry), place)
    if isinstance(entry, Device):
        try:
            soft_maximum(entry.gemm.sharpness)
        except ValueError as error:
            raise ConfigError(f"{place}.gemm.sharpness: {error}") from None
    return entry


def _check_numbers(value: Any, place: str) -> None:
    """Every figure is finite and positive; a share is at most 1."""
    key = place.rpartition(".")[2]
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_numbers(inner, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_numbers(inner, place)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value) or value < 0 or (value == 0 and key not in MAY_BE_ZERO):
            raise ConfigError(f"{place} must be a positive number, not {value}")
        if key.endswith("_share") and value > 1:
            raise ConfigError(f"{place} is a share: at most 1, not {value}")
