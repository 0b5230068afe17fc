"""The runs of a benchmark in a file that is written after each run, so that the benchmark can be
run in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from benchmarks.errors import BenchError

B = TypeVar("B")


class KeptRuns(Generic[B]):
    """The rows so far, and their bases, which are measured once. A row replaces the one with the
    same values of `row_key`."""

    def __init__(
        self,
        path: Path | None,
        row_key: tuple[str, ...],
        basis: type[B],
        origin: dict[str, str],
        **setup: msgspec.Struct,
    ) -> None:
        """Reads the earlier runs, which must have had the same `setup`. Raises BenchError."""
        self._path, self._row_key, self._origin, self._setup = path, row_key, origin, setup
        self.bases: dict[str, B] = {}
        self.rows: list[dict[str, Any]] = []
        if path is None or not path.exists():
            return
        try:
            found = msgspec.json.decode(path.read_bytes())
            self.rows = found["rows"]
            self.bases = msgspec.convert(found["bases"], dict[str, basis])  # type: ignore[valid-type]
            other = [n for n, own in setup.items() if msgspec.convert(found[n], type(own)) != own]
        except (OSError, KeyError, TypeError, msgspec.DecodeError) as error:
            text = f"{path} is no file of this benchmark ({error}): name another one"
            raise BenchError(text) from None
        if other:
            raise BenchError(f"{path} has runs of another {other[0]}: name another file")

    def has(self, **key: Any) -> bool:
        return any(all(row[name] == key[name] for name in key) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        key = {name: row[name] for name in self._row_key}
        self.rows = [one for one in self.rows if any(one[name] != key[name] for name in key)]
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Raises BenchError."""
        if self._path is None:
            return
        text = msgspec.json.encode(self.found() | {"origin": self._origin})
        try:
            self._path.write_bytes(msgspec.json.format(text, indent=1) + b"\n")
        except OSError as error:
            raise BenchError(f"cannot write {self._path}: {error.strerror}") from None

    def found(self) -> dict[str, Any]:
        built = {**self._setup, "bases": self.bases, "rows": self.rows}
        return {name: msgspec.to_builtins(value) for name, value in built.items()}
