"""The fields of a model's description, each read by its type.

Fields can be read only with their type, so that each one is checked, because a model's files may be
damaged or hostile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool.text.model_error import (
    LARGEST,
    LARGEST_NUMBER,
    LARGEST_SIZE,
    LARGEST_TOKEN,
    ModelError,
)
from moonpool.text.shown import shown


class Fields:
    """One JSON object. Each method raises `ModelError`, which names file, field and value.

    A field that is null counts as missing.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        """`where`: the file, as errors name it. `prefix`: of the fields' names."""
        self._values = values
        self.where = where
        self.prefix = prefix

    def over(self, others: Fields) -> Fields:
        """Returns these fields, completed by those of the others that are absent here; a null field
        is not absent."""
        return Fields({**others._values, **self._values}, self.where, self.prefix)

    def made(self, values: Mapping[str, Any]) -> Fields:
        """Returns fields with these values, at the same place of the file."""
        return Fields(values, self.where, self.prefix)

    def __contains__(self, name: str) -> bool:
        """Whether the field is present, even if it is null."""
        return name in self._values

    def has(self, name: str) -> bool:
        """Whether the field has a value."""
        return self._values.get(name) is not None

    def renamed(self, aliases: Mapping[str, str]) -> Fields:
        """Returns the fields under our names; `aliases` has the file's name for each of ours."""
        found = {ours: self._values[name] for ours, name in aliases.items() if name in self}
        return self.made(found)

    def picked(self, *names: str) -> Fields:
        """The named fields that have a value."""
        return self.made({name: self._values[name] for name in names if self.has(name)})

    def error(self, text: str) -> ModelError:
        """Returns an error for the caller to raise. `text` begins with the name of a field."""
        return ModelError(f"{self.where}: {self.prefix}{text}")

    def _is_not(self, name: str, wanted: str) -> ModelError:
        return self.error(f"{name} is {shown(self._values.get(name))}, not {wanted}")

    def _lacks(self, name: str) -> ModelError:
        return ModelError(f"{self.where} lacks {self.prefix + name!r}")

    def within(self, name: str) -> Fields:
        """The fields of the object `name`; none if it is missing."""
        value = self._values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self._is_not(name, "an object")
        return Fields(value, self.where, f"{self.prefix}{name}.")

    def objects(self, name: str) -> list[Fields]:
        """A list of objects; empty if it is missing."""
        found = self._list(name, Mapping, "objects") or []
        return [Fields(e, self.where, f"{self.prefix}{name}[{i}].") for i, e in enumerate(found)]

    def is_object(self, name: str) -> bool:
        return isinstance(self._values.get(name), Mapping)

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._is_not(name, "true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._is_not(name, "a text")
        return value

    def is_text(self, name: str) -> bool:
        return isinstance(self._values.get(name), str)

    def is_list(self, name: str) -> bool:
        return isinstance(self._values.get(name), list)

    def texts(self, name: str) -> list[str] | None:
        """A list of texts; None if it is missing."""
        return self._list(name, str, "texts")

    def number(self, name: str, default: float | None = None, or_zero: bool = False) -> float:
        """A finite number above 0, or 0 if that is allowed."""
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self._lacks(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (0 < value <= LARGEST_NUMBER or (or_zero and value == 0)):
            raise self._is_not(name, f"a number {'from' if or_zero else 'above'} 0")
        return float(value)

    def numbers(self, name: str) -> list[float] | None:
        """A list of finite numbers above 0; None if it is missing."""
        found = self._list(name, (int, float), "numbers above 0")
        if found is not None and not all(0 < each <= LARGEST_NUMBER for each in found):
            raise self._is_not(name, "a list of numbers above 0")
        return None if found is None else [float(each) for each in found]

    def positive(self, name: str, default: int | None = None) -> int:
        """A whole number above 0."""
        return self.count(name, default, least=1)

    def count(self, name: str, default: int | None = None, least: int = 0) -> int:
        """A whole number, at least `least` and no larger than any model has it."""
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self._lacks(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            whole = {0: "a whole number from 0", 1: "a positive integer"}
            raise self.error(
                f"{name} is {shown(value)}, not {whole.get(least, f'a whole number from {least}')}"
            )
        most = LARGEST.get(name, LARGEST_SIZE)
        if value > most:
            raise self.error(f"{name} is {shown(value)}; at most {most} is supported")
        return value

    def whole_numbers(self, name: str) -> list[int] | None:
        """A list of whole numbers; None if it is missing."""
        return self._list(name, int, "whole numbers")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id, or a list of them; none if it is missing or -1."""
        value = self._values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_is_token_id(each) for each in ids):
            raise self._is_not(name, "a token id or a list of them")
        return tuple(dict.fromkeys(each for each in ids if each >= 0))

    def _list(self, name: str, kind: type | tuple[type, ...], words: str) -> list[Any] | None:
        value = self._values.get(name)
        if value is None:
            return None
        is_list = isinstance(value, list)
        if not is_list or not all(isinstance(e, kind) and not isinstance(e, bool) for e in value):
            raise self._is_not(name, f"a list of {words}")
        found: list[Any] = value
        return found


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= LARGEST_TOKEN
