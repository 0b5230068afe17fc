"""Writes rows as Mooncake's jsonl, times in whole milliseconds. The file appears when it is
complete."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from moonpool.trace.row import TraceRow


class _Line(msgspec.Struct, omit_defaults=True, gc=False):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] | None = None


def write_trace(rows: Iterable[TraceRow], path: Path) -> int:
    """Number of rows written. Their hash ids must name Mooncake's blocks of 512 tokens, or be
    none. Raises OSError."""
    partial = path.with_name(path.name + ".part")
    encode = msgspec.json.Encoder().encode
    num_rows = 0
    try:
        with partial.open("wb") as file:
            for row in rows:
                line = _Line(
                    round(row.arrived_s * 1000),
                    row.input_tokens,
                    row.output_tokens,
                    row.hash_ids or None,
                )
                file.write(encode(line))
                file.write(b"\n")
                num_rows += 1
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return num_rows
