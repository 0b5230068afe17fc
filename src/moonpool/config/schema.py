"""Describes how a configuration of msgspec structs is documented, read from TOML and range-checked.

Each field carries one description, its limits and the name of its flag (see `about`). The TOML
reader, the range check and the command line all use these descriptions, so they cannot differ.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

C = TypeVar("C", bound=msgspec.Struct)
Values = dict[str, dict[str, Any]]
"""Values of a configuration: table -> key -> value."""


BAD_TOML = (tomllib.TOMLDecodeError, RecursionError)
"""Errors that tomllib raises for text that is not TOML, or that nests too deeply."""


class ConfigError(ValueError):
    """The configuration cannot be used. Each of `problems` is one line that says what is wrong and
    what to do."""

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(map(str, self.args))

    def __str__(self) -> str:
        return "; ".join(self.problems)


def about(
    description: str, flag: str = "", metavar: str = "", protects: bool = False, **limits: Any
) -> Meta:
    """Metadata of one field: a full sentence with its unit, and the limits `ge`, `gt`, `le`, `lt`.

    `flag` is needed only if it is not the key with dashes; `metavar` if the type's name says too
    little. `protects`: whether an empty value is an error, because an unset variable must not leave
    the server unprotected.
    """
    extra = {"flag": flag, "metavar": metavar, "protects": protects}
    return Meta(description=description, extra=extra, **limits)


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
    def protects(self) -> bool:
        return bool((self.meta.extra or {}).get("protects"))

    @property
    def limits(self) -> str:
        """Returns the limits in words, such as "0 to 64" or "> 0 seconds", or "" if there are
        none."""
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
    """Returns every key of every table, by "table.key"."""
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
    tables = load_toml(text)
    raise_all(name_problems(tables, config))
    return tables


def load_toml(text: str) -> Values:
    """Reads TOML text, whatever it names. Raises ConfigError: bad TOML."""
    try:
        return tomllib.loads(text)
    except BAD_TOML as error:
        raise ConfigError(f"the config is not valid TOML: {error}") from None


def name_problems(tables: Values, config: type[msgspec.Struct]) -> list[str]:
    """Returns a line for each unknown table and key, with the nearest known name, and for each
    protective value that is empty. Removes the unknown names from `tables`."""
    hints = get_type_hints(config)
    problems = []
    for table, values in list(tables.items()):
        if table not in hints:
            problems.append(f"unknown table [{table}]{_nearest(table, hints)}")
        elif not isinstance(values, dict):
            problems.append(f"[{table}] must be a table, not {type(values).__name__}")
        else:
            known = hints[table].__struct_fields__
            unknown = [key for key in values if key not in known]
            problems += [f"unknown key {table}.{key}{_nearest(key, known)}" for key in unknown]
            tables[table] = {key: value for key, value in values.items() if key in known}
            continue
        del tables[table]
    return [*problems, *_empty_protections(tables, config)]


def _empty_protections(tables: Values, config: type[msgspec.Struct]) -> list[str]:
    """Returns a line for each value that protects, is given, and is empty. Removes the empty values
    from `tables`."""
    problems = []
    for field in schema_of(config).values():
        given = tables.get(field.table, {}).get(field.key)
        each = given if isinstance(given, list | tuple) else [given]
        if field.protects and any(isinstance(one, str) and not one.strip() for one in each):
            what = f"{field.name} ({field.flag}) is given and empty"
            problems.append(f"{what}: give a value, or leave it out")
            del tables[field.table][field.key]
    return problems


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(known)}"


def value_problems(tables: Values, config: type[msgspec.Struct]) -> list[str]:
    """Returns a line for each value of a wrong type or out of range."""
    problems = []
    for field in schema_of(config).values():
        values = tables.get(field.table, {})
        if field.key not in values:
            continue
        value = values[field.key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not field.allows(value):
            problems.append(f"{field.name} must be {field.limits}")
            continue
        try:
            msgspec.convert(value, field.kind)
        except msgspec.ValidationError as error:
            text, _, inner = str(error).partition(" - at `$")
            where = f"`$.{field.name}{inner or '`'}"
            problems.append(f"the config has a bad value: {text} - at {where}")
    return problems


def convert_tables(tables: Values, config: type[C], problems: Iterable[str] = ()) -> C:
    """Makes the structs. Raises ConfigError for these problems, and for all values of a wrong type
    or out of range."""
    raise_all([*problems, *value_problems(tables, config)])
    try:
        return msgspec.convert(tables, config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the config has a bad value: {error}") from None


def check_ranges(config: msgspec.Struct) -> None:
    """Raises ConfigError for all values that their own limits forbid."""
    values = (
        (f, getattr(getattr(config, f.table), f.key)) for f in schema_of(type(config)).values()
    )
    raise_all(
        f"{field.name} must be {field.limits}"
        for field, value in values
        if value is not None and not field.allows(value)
    )


def check_all(checks: Iterable[Callable[[C], None]], config: C) -> None:
    """Raises ConfigError with the problems that these checks raise, each once."""
    problems: dict[str, None] = {}
    for check in checks:
        try:
            check(config)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    raise_all(problems)


def raise_all(problems: Iterable[str]) -> None:
    """Raises ConfigError if there are any."""
    found = tuple(problems)
    if found:
        raise ConfigError(*found)


def require(holds: bool, name: str, wanted: str) -> None:
    """Raises ConfigError unless the condition holds."""
    if not holds:
        raise ConfigError(f"{name} must be {wanted}")


def choices(alias: Any) -> tuple[str, ...]:
    """The allowed values of a Literal type, for the command line."""
    return get_args(alias)
