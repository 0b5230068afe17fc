"""What a format's parser makes of one line, and the interface all parsers share."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Parsed(NamedTuple):
    """One row in the file's own terms: `time` counts the parser's units since some origin."""

    time: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    session: str = ""


class LineError(ValueError):
    """A line cannot be used; the reader adds the file and the line number."""


class Parser(Protocol):
    """Reads single lines. Raises `LineError`; None is a row to skip and count."""

    format: str
    block_tokens: int  # 0: no hashes
    header_lines: int
    ignored: tuple[str, ...]  # fields of the file that nothing here reads

    @property
    def units_per_s(self) -> float: ...

    def parse(self, line: bytes) -> Parsed | None: ...
