"""The metadata of a GGUF file's architecture, checked for their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool.engine.gguf.reader import GgufFile
from moonpool.engine.spec import ModelError


class ArchitectureValues:
    """The values whose keys begin with the name of the file's architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self._metadata: Mapping[str, Any] = file.metadata
        self._prefix = file.metadata["general.architecture"]

    def optional(self, name: str) -> Any:
        return self._metadata.get(f"{self._prefix}.{name}")

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number, at least `least`. An array must have it at every place. Raises
        ModelError."""
        value = self.optional(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.path} lacks {self._prefix}.{name}")
        if hasattr(value, "tolist"):
            (value, *others) = sorted(set(value.tolist())) or [None]
            if others:
                raise ModelError(f"{self.path}: {name} differs between layers")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            shown = short_text(value)
            raise ModelError(f"{self.path}: {name} is {shown}, not a number of at least {least}")
        return value

    def most(self, name: str, default: int) -> int:
        """As `count`, but an array may have 0 at some places. Raises ModelError."""
        value = self.optional(name)
        if hasattr(value, "tolist"):
            found = {one for one in value.tolist() if one != 0}
            if len(found) == 1 and isinstance(one := found.pop(), int) and one > 0:
                return one
        return self.count(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0. Raises ModelError for another value, and if the key is absent and has
        no default."""
        value = self.optional(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise ModelError(f"{self.path}: {name} is {short_text(value)}, not a number above 0")
        return float(value)


def short_text(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
