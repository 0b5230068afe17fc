"""Reads a configuration, TOML text and what command lines lay over it; and writes it as TOML."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from moonpool.config.rules import check_values
from moonpool.config.schema import Values, convert_tables, load_toml, name_problems
from moonpool.config.tables import POLICY_KEYS, Config


def parse_config(
    text: str,
    overrides: Values | None = None,
    defaults: Values | None = None,
    own_name: Callable[[str, str], str] = lambda key, name: name,
) -> Config:
    """Reads TOML text, lays `overrides` (table -> key -> value) over it, and checks the result.
    A key in neither gets its value from `defaults`, or else from the tables above. `own_name`
    returns the "module:Class" of a policy that a package installed under a name, by key.

    Raises ConfigError for bad TOML; otherwise for all unknown names, wrong types and values out of
    range; otherwise for all values that contradict each other.
    """
    tables = load_toml(text)
    problems = name_problems(tables, Config)
    for table, values in (overrides or {}).items():
        tables.setdefault(table, {}).update(values)
    problems += name_problems(tables, Config)
    for table, values in (defaults or {}).items():
        tables[table] = values | tables.get(table, {})
    for table, key in POLICY_KEYS:
        name = tables.get(table, {}).get(key)
        if isinstance(name, str):
            tables[table] = tables[table] | {key: own_name(f"{table}.{key}", name)}
    _settle_vllms(tables)
    config = convert_tables(tables, Config, problems)
    check_values(config)
    return config


def _settle_vllms(tables: dict[str, Any]) -> None:
    """Sets the numbers of instances to the numbers of named vLLM servers, and serves their models
    unless one is named."""
    named = tables.get("vllm")
    roles = ("prefill", "decode", "mixed")
    names_any = isinstance(named, dict) and any(named.get(key) for key in (*roles, "endpoints"))
    if names_any:
        tables.setdefault("engine", {}).setdefault("kind", "vllm")
    if tables.get("engine", {}).get("kind") == "vllm":
        tables.setdefault("model", {}).setdefault("name", "")
    if not isinstance(named, dict) or not names_any:
        return
    counts = tables.setdefault("cluster", {})
    for role in roles:
        places = named.get(role, ())
        if isinstance(places, list | tuple):
            counts.setdefault(role, len(places))


def toml_value(value: Any) -> str:
    """Returns a value of the configuration as TOML, which has nothing for None."""
    if value is None:
        return "not set"
    if isinstance(value, msgspec.Struct):
        pairs = msgspec.to_builtins(value).items()
        return f"{{ {', '.join(f'{key} = {toml_value(each)}' for key, each in pairs)} }}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml_value(each) for each in value)}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def write_toml(config: msgspec.Struct) -> str:
    """Returns all values that differ from the defaults, including secrets, in the form that
    `parse_config` reads."""
    lines = []
    for table, default in msgspec.structs.asdict(type(config)()).items():
        values = getattr(config, table)
        lines.append(f"[{table}]")
        for key in values.__struct_fields__:
            value = getattr(values, key)
            if value is not None and value != getattr(default, key):
                lines.append(f"{key} = {toml_value(value)}")
    return "\n".join(lines) + "\n"
