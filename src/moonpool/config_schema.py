"""How a configuration of msgspec structs describes itself, is read from TOML and is range-checked.

Each field carries one description, its limits and the name of its flag (see `about`). The TOML
reader, the range check and the command line all work from these, so none of them can differ.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

C = TypeVar("C", bound=msgspec.Struct)
Values = dict[str, dict[str, Any]]
"""Values of a configuration: table -> key -> value."""


BAD_TOML = (tomllib.TOMLDecodeError, RecursionError)
"""What tomllib raises for text that is no TOML, or that nests too deeply."""


class ConfigError(ValueError):
    """The configuration cannot be used; the text says what is wrong and what to do."""


def about(description: str, flag: str = "", metavar: str = "", **limits: Any) -> Meta:
    """Metadata of one field: a full sentence with its unit, and the limits `ge`, `gt`, `le`, `lt`.

    `flag` is needed only where it is not the key with dashes; `metavar` where the type's name says
    too little.
    """
    return Meta(description=description, extra={"flag": flag, "metavar": metavar}, **limits)


class FieldSchema(NamedTuple):
    """One key of one table: its type without metadata, its metadata, and its flag."""

    table: str
    key: str
    kind: Any
    meta: Meta
    flag: str

    @property
    def name(self) -> str:
        return f"{self.table}.{self.key}"

    @property
    def limits(self) -> str:
        """The limits in words, such as "0 to 64" or "> 0 seconds"; "" where there are none."""
        meta = self.meta
        unit = " seconds" if self.key.endswith("_s") and not self.key.endswith("_per_s") else ""
        if meta.ge is not None and meta.le is not None:
            return f"{meta.ge:g} to {meta.le:g}{unit}"
        signs = ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt))
        words = [f"{sign} {limit:g}{unit}" for sign, limit in signs if limit is not None]
        return " and ".join(words)

    def allows(self, value: Any) -> bool:
        """Whether the value keeps the limits; NaN keeps none."""
        meta = self.meta
        return (
            (meta.ge is None or value >= meta.ge)
            and (meta.gt is None or value > meta.gt)
            and (meta.le is None or value <= meta.le)
            and (meta.lt is None or value < meta.lt)
        )


@cache
def schema_of(config: type[msgspec.Struct]) -> Mapping[str, FieldSchema]:
    """Every key of every table, by "table.key"."""
    return {field.name: field for field in _fields(config)}


def _fields(config: type[msgspec.Struct]) -> Iterator[FieldSchema]:
    for table, struct in get_type_hints(config).items():
        for key, hint in get_type_hints(struct, include_extras=True).items():
            hint = _annotated(hint)
            kind, *metas = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            meta = metas[0] if metas else Meta()
            flag = (meta.extra or {}).get("flag") or f"--{key.replace('_', '-')}"
            yield FieldSchema(table, key, kind, meta, flag)


def _annotated(hint: Any) -> Any:
    """The annotated type of a key that may also be None."""
    return next((part for part in get_args(hint) if get_origin(part) is Annotated), hint)


def parse_toml(text: str, config: type[msgspec.Struct]) -> Values:
    """Reads TOML text into tables. Raises ConfigError: bad TOML, an unknown table or key."""
    try:
        tables: Values = tomllib.loads(text)
    except BAD_TOML as error:
        raise ConfigError(f"the config is not valid TOML: {error}") from None
    check_names(tables, config)
    return tables


def check_names(tables: Values, config: type[msgspec.Struct]) -> None:
    """Raises ConfigError for an unknown table or key, and names the nearest known one."""
    hints = get_type_hints(config)
    for table, values in tables.items():
        if table not in hints:
            raise ConfigError(f"unknown table [{table}]{_nearest(table, hints)}")
        if not isinstance(values, dict):
            raise ConfigError(f"[{table}] must be a table, not {type(values).__name__}")
        known = hints[table].__struct_fields__
        for key in values:
            if key not in known:
                raise ConfigError(f"unknown key {table}.{key}{_nearest(key, known)}")


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(known)}"


def convert_tables(tables: Values, config: type[C]) -> C:
    """Makes the structs. Raises ConfigError for a value of the wrong type or out of range."""
    for field in schema_of(config).values():
        value = tables.get(field.table, {}).get(field.key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            check_range(field, value)
    try:
        return msgspec.convert(tables, config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the config has a bad value: {error}") from None


def check_ranges(config: msgspec.Struct) -> None:
    """Raises ConfigError for the first value that its own limits forbid."""
    for field in schema_of(type(config)).values():
        value = getattr(getattr(config, field.table), field.key)
        if value is not None:
            check_range(field, value)


def check_range(field: FieldSchema, value: Any) -> None:
    """Raises ConfigError."""
    require(field.allows(value), field.name, field.limits)


def require(holds: bool, name: str, wanted: str) -> None:
    """Raises ConfigError unless the condition holds."""
    if not holds:
        raise ConfigError(f"{name} must be {wanted}")


def choices(alias: Any) -> tuple[str, ...]:
    """The allowed values of a Literal type, for the command line."""
    return get_args(alias)
