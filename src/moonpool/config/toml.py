"""Writes a configuration as TOML."""

from __future__ import annotations

import json
from typing import Any

import msgspec


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
    """Returns all values that are not the default, secrets included, as `parse_config` reads
    them."""
    lines = []
    for table, default in msgspec.structs.asdict(type(config)()).items():
        values = getattr(config, table)
        lines.append(f"[{table}]")
        for key in values.__struct_fields__:
            value = getattr(values, key)
            if value is not None and value != getattr(default, key):
                lines.append(f"{key} = {toml_value(value)}")
    return "\n".join(lines) + "\n"
