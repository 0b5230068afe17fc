"""Devices and model shapes by name: the built-in catalogue, and the files that extend it.

The built-in catalogue is `catalogue.toml`. A file given with `--catalogue` has the same format and
is laid over it:

[devices.H100-SXM]                # changes a known device, key by key
price = { usd_per_h = 2.1, date = "2026-11", source = "our contract" }

[devices.B200]                    # adds a device; `like` takes over every key that is not given
like = "H200"
peak_flops_per_s = 2.25e15

[shapes.my-model]
like = "llama3-70b"
layers = 40
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import msgspec

from moonpool.config.schema import BAD_TOML
from moonpool.config.tables import ConfigError
from moonpool.sim.hardware.devices import Device
from moonpool.sim.hardware.matrix_product import soft_maximum
from moonpool.sim.hardware.model_shapes import ModelShape
from moonpool.types import Struct

Entry = TypeVar("Entry", Device, ModelShape)
MAX_NUMBER = 1e300
NEAR_NAMES = 3
_OTHERS = " (--catalogue FILE adds others)"
MAY_BE_ZERO = {"nvlink_bytes_per_s", "launch_s", "alpha_s", "nic_latency_s", "usd_per_h"}
MAY_BE_ZERO |= {"window", "full_every", "max_positions"}
MAY_BE_ZERO |= {"experts.shared_ffn", "experts.dense_layers", "experts.bytes_per_weight"}
MAY_BE_ZERO |= {"latent.query_rank", "bytes_per_embedding", "peak_fp8_flops_per_s"}


class Catalogue(Struct, frozen=True):
    """Devices and model shapes, each with a unique name."""

    devices: tuple[Device, ...]
    shapes: tuple[ModelShape, ...]

    def device(self, name: str) -> Device:
        """Returns a device. Raises ConfigError, which names the nearest known devices."""
        return _find(self.devices, name, "device", _OTHERS)

    def shape(self, name: str) -> ModelShape:
        """Returns a shape. Raises ConfigError, which names the nearest known shapes."""
        return _find(self.shapes, name, "model shape", _OTHERS)


def package_text(file_name: str) -> str:
    """The text of a TOML file in the folder of this module."""
    return resources.files(__package__).joinpath(file_name).read_text(encoding="utf-8")


def parse_catalogue(text: str, base: Catalogue | None = None) -> Catalogue:
    """Returns `base` (the built-in catalogue by default) with the additions and changes of the TOML
    text. Raises ConfigError."""
    base = BUILT_IN if base is None else base
    try:
        tables = tomllib.loads(text)
    except BAD_TOML as error:
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


def nearest(name: str, known: Iterable[str], most: int = 1) -> str:
    """Returns the end of an error message about an unknown name: the nearest or all known names."""
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=most, cutoff=0.4)
    if close:
        return f"; did you mean {' or '.join(repr(by_lower[each]) for each in close)}?"
    return f"; known are {', '.join(by_lower.values())}"


def _find(entries: tuple[Entry, ...], name: str, noun: str, advice: str = "") -> Entry:
    for entry in entries:
        if entry.name == name:
            return entry
    near = nearest(name, (e.name for e in entries), NEAR_NAMES if advice else 1)
    raise ConfigError(f"unknown {noun} {name!r}{near}{advice}")


def _merge(
    known: tuple[Entry, ...], tables: dict[str, Any], kind: type[Entry], table: str
) -> tuple[Entry, ...]:
    merged = {entry.name: entry for entry in known}
    for name, given in tables.items():
        place = f"[{table}.{name}]"
        keys = [field for field in kind.__struct_fields__ if field != "name"] + ["like"]
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


@cache
def _required(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Returns the fields without a default, for which msgspec compiles the types of all fields."""
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.required)


def _check_complete(
    name: str, given: dict[str, Any], kind: type[Entry], place: str, known: Iterable[str]
) -> None:
    absent = [key for key in _required(kind) if key != "name" and key not in given]
    if absent:
        raise ConfigError(
            f"{place} is new and lacks {', '.join(absent)}: give them, or a known name as `like`"
            f"{nearest(name, known)}"
        )


def _overlay(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merges nested tables key by key and replaces every other value."""
    whole = dict(base)
    for key, value in changes.items():
        if hasattr(value, "isoformat"):  # TOML reads an unquoted date as a date object
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
    """Raises ConfigError unless every figure is finite and positive, and every share at most 1."""
    key = place.rpartition(".")[2]
    keys = {key, ".".join(place.split(".")[-2:])}
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_numbers(inner, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_numbers(inner, place)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value < MAX_NUMBER or (value == 0 and not keys & MAY_BE_ZERO):
            shown = "one so large" if abs(value) > MAX_NUMBER else value
            raise ConfigError(f"{place} must be a positive number, not {shown}")
        if key.endswith("_share") and value > 1:
            raise ConfigError(f"{place} is a share: at most 1, not {value}")


BUILT_IN = parse_catalogue(package_text("catalogue.toml"), Catalogue(devices=(), shapes=()))
