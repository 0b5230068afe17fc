"""The metadata of a GGUF file's architecture, checked for their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moonpool.text.model_error import LARGEST_NUMBER, LARGEST_TOKEN, ModelError
from moonpool.text.shown import shown
from moonpool_engine.engine.gguf.reader import GgufFile, StoredTexts

_NO_TOKEN = 2**32 - 1


class MetadataValues:
    """Reads the metadata of a file. Each method raises a `ModelError` that names file, key and
    value.

    GGUF has no null, so a key without a value is a missing key.
    """

    def __init__(self, file: GgufFile, prefix: str = "") -> None:
        """`prefix`: the text with which all keys begin."""
        self.path = file.path
        self._metadata: Mapping[str, Any] = file.metadata
        self._prefix = prefix

    def has(self, name: str) -> bool:
        return self._prefix + name in self._metadata

    def error(self, name: str, wanted: str) -> ModelError:
        value = shown(_plain(self._value(name)))
        return ModelError(f"{self.path}: {self._prefix}{name} is {value}, not {wanted}")

    def _value(self, name: str) -> Any:
        return self._metadata.get(self._prefix + name)

    def text(self, name: str, default: str = "") -> str:
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(name, "a text")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false; some writers use 0 and 1."""
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, int) or value not in (0, 1):
            raise self.error(name, "true or false")
        return bool(value)

    def flags(self, name: str) -> list[bool] | None:
        """Returns true or false for each layer, or None if the file has no such list."""
        value = self._value(name)
        if not isinstance(value, np.ndarray):
            return None
        return [bool(each) for each in value.tolist()]

    def texts(self, name: str) -> list[str]:
        """A list of texts; empty if it is missing."""
        value = self._value(name)
        if value is None:
            return []
        if not isinstance(value, StoredTexts):
            raise self.error(name, "a list of texts")
        return value.texts

    def numbers(self, name: str) -> list[Any]:
        """A list of numbers; empty if it is missing."""
        value = self._value(name)
        if value is None:
            return []
        if not isinstance(value, np.ndarray):
            raise self.error(name, "a list of numbers")
        found: list[Any] = value.tolist()
        return found

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Returns a whole number that is at least `least`. An array must have it at every place."""
        value = self._value(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.path} lacks {self._prefix}{name}")
        if isinstance(value, np.ndarray):
            (value, *others) = sorted(set(value.tolist())) or [None]
            if others:
                raise ModelError(f"{self.path}: {self._prefix}{name} differs between layers")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(name, f"a number of at least {least}")
        return value

    def optional_count(self, name: str) -> int | None:
        """Reads like `count`; returns None if the number is missing or 0."""
        return (self.count(name, least=0) or None) if self.has(name) else None

    def most(self, name: str, default: int) -> int:
        """Reads as `count` does, but an array may have 0 at some places."""
        value = self._value(name)
        if isinstance(value, np.ndarray):
            found = {one for one in value.tolist() if one != 0}
            if len(found) == 1 and isinstance(one := found.pop(), int) and one > 0:
                return one
        return self.count(name, default)

    def number(self, name: str, default: float | None = None, or_zero: bool = False) -> float:
        """Returns a number above 0; with `or_zero`, 0 is allowed too."""
        value = self._value(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.path} lacks {self._prefix}{name}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (0 < value < LARGEST_NUMBER or (or_zero and value == 0)):
            raise self.error(name, f"a number {'from' if or_zero else 'above'} 0")
        return float(value)

    def token_id(self, name: str) -> int | None:
        """Returns the id of a token, or None if it is missing, or -1 as an unsigned number."""
        value = self._value(name)
        if value is None:
            return None
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and value == _NO_TOKEN:
            return None
        if not is_number or not 0 <= value <= LARGEST_TOKEN:
            raise self.error(name, "a token id")
        return int(value)


def _plain(value: object) -> object:
    """The first elements of an array, as a list."""
    if isinstance(value, StoredTexts):
        return value.texts[:8]
    return value[:8].tolist() if isinstance(value, np.ndarray) else value


def architecture_values(file: GgufFile) -> MetadataValues:
    """The values whose keys begin with the name of the file's architecture."""
    return MetadataValues(file, f"{file.metadata['general.architecture']}.")
