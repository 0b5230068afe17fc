"""Single values of a parsed `config.json`, each checked; raise `ModelError` with key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool.engine.spec import LARGEST, LARGEST_SIZE, ModelError


def mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object of the config; empty if it is missing. Raises ModelError."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json: {name} is {value!r}, not an object")
    return value


def number(config: Mapping[str, Any], name: str, default: float) -> float:
    """A number above 0. Raises ModelError."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ModelError(f"config.json: {name} is {value!r}, not a number above 0")
    return float(value)


def positive(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number above 0. Raises ModelError."""
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json lacks {name!r}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {name} is {str(value)[:80]!r}, not a positive integer")
    most = LARGEST.get(name, LARGEST_SIZE)
    if value > most:
        raise ModelError(f"config.json: {name} is {str(value)[:80]}; at most {most} is supported")
    return value


def whole_numbers(config: Mapping[str, Any], name: str) -> list[int] | None:
    """A list of whole numbers; None if it is missing. Raises ModelError."""
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
        raise ModelError(f"config.json: {name} is {value!r}, not a list of whole numbers")
    return value
