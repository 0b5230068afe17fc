"""From a config file and flags to a `Config`, or to one line about what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from moonpool.cli.output import fail
from moonpool.config import Config, ConfigError, parse_config

FlagKeys = Mapping[str, tuple[str, str]]
"""Flag -> (table, key) of the configuration that it overrides."""


def read_config(
    config_file: str | None,
    flags: Mapping[str, Any],
    flag_keys: FlagKeys,
    defaults: dict[str, dict[str, Any]] | None = None,
) -> Config:
    """File, then flags; below both, `defaults`. Ends the command on a mistake."""
    overrides: dict[str, dict[str, Any]] = {}
    for flag, value in flags.items():
        if value is None or value == ():
            continue
        table, key = flag_keys[flag]
        overrides.setdefault(table, {})[key] = value
    text = "" if config_file is None else read_text(config_file, "the config")
    try:
        return parse_config(text, overrides, defaults)
    except ConfigError as error:
        fail(str(error))


def show_defaults(command: Any, flag_keys: FlagKeys, config: Config) -> Any:
    """Has --help tell what holds where neither a flag nor a file says anything. Where that is
    nothing, or depends on the machine, the option's own text may."""
    for option in command.__click_params__:
        if option.name in flag_keys and isinstance(option, click.Option):
            table, key = flag_keys[option.name]
            value = getattr(getattr(config, table), key)
            if value and not option.is_flag:
                shown = f"{value:g}" if isinstance(value, float) else value
                option.help = f"{option.help or ''}  [default: {shown}]".strip()
    return command


def read_text(path: str, what: str) -> str:
    """A small text file's content. Ends the command if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        fail(f"cannot read {what} {path}: {error.strerror}")
    except UnicodeDecodeError:
        fail(f"cannot read {what} {path}: it is not UTF-8 text")
