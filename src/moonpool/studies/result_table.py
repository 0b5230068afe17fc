"""Holds a table of figures, and gives it as Python values, CSV, Parquet or a pandas DataFrame."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


class ResultTable:
    """A table of columns of equal length. Iteration yields each row as a dict, with None for a
    missing value."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self.columns = dict(columns)
        self._num_rows = len(next(iter(self.columns.values()))) if self.columns else 0
        assert all(len(column) == self._num_rows for column in self.columns.values())

    @classmethod
    def from_rows(cls, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> ResultTable:
        """Returns the table of these rows, each with one value for each name."""
        return cls({name: [row[index] for row in rows] for index, name in enumerate(names)})

    def __len__(self) -> int:
        return self._num_rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for values in zip(*self.columns.values(), strict=True):
            yield dict(zip(self.columns, values, strict=True))

    def __getitem__(self, name: str) -> Sequence[Any]:
        """Returns the column of that name. Raises KeyError."""
        return self.columns[name]

    def __repr__(self) -> str:
        return f"<ResultTable of {len(self):,} rows: {', '.join(self.columns)}>"

    def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame`. Raises ImportError if pandas is not installed."""
        return _pandas().DataFrame(self.columns)

    def to_csv(self, path: str | Path) -> None:
        """Writes a CSV header and the rows, with missing values as empty fields. Raises OSError."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(self.columns)
            writer.writerows(zip(*self.columns.values(), strict=True))

    def to_parquet(self, path: str | Path) -> None:
        """Writes the table as Parquet. Raises OSError, and ImportError if pyarrow is not
        installed."""
        arrow, parquet = _pyarrow()
        parquet.write_table(arrow.table(self.columns), str(path))

    def write(self, path: str | Path) -> None:
        """Writes Parquet if the name ends in `.parquet`, otherwise CSV. Raises the errors of
        `to_parquet` and `to_csv`."""
        if Path(path).suffix.lower() == ".parquet":
            self.to_parquet(path)
        else:
            self.to_csv(path)

    def _repr_html_(self) -> str:
        """Returns the first rows as HTML, for notebooks."""
        from moonpool.studies.notebook_html import table_html

        return table_html(self)


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError("Parquet needs pyarrow: pip install pyarrow") from None
    return pyarrow, pyarrow.parquet


def _pandas() -> ModuleType:
    try:
        import pandas
    except ImportError:
        raise ImportError("to_pandas() needs pandas: pip install pandas") from None
    return pandas  # type: ignore[no-any-return]
