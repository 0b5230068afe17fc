"""Trace formats from outside the package: a parser of single lines, named "module:Name".

docs/extending.md describes the interface. The reader does everything else, as for built-in formats:
it sorts, counts from the first request, and names the line in every error.
"""

from __future__ import annotations

from math import inf, isfinite
from typing import Any

from moonpool.config.tables import ConfigError
from moonpool.plugins.objects import find_object, make_object
from moonpool.trace.row import MAX_LENGTH_TOKENS, LineError, ParsedRow, TraceError, TraceRow

KEY = "trace format"


class OwnParser:
    """Calls the user's `parse`, and checks what it returns."""

    ignored: tuple[str, ...] = ()

    def __init__(self, name: str) -> None:
        """Raises TraceError."""
        try:
            found = find_object(KEY, name)
            parser = make_object(KEY, name, found) if isinstance(found, type) else found
        except ConfigError as error:
            raise TraceError(str(error)) from None
        self._parse = getattr(parser, "parse", parser)
        if not callable(self._parse):
            raise TraceError(f"{KEY} {name}: it needs a method parse(line)")
        self.format = name
        self.block_tokens = self._whole(parser, "block_tokens")
        self.header_lines = self._whole(parser, "header_lines")
        self.units_per_s = getattr(parser, "units_per_s", 1.0)
        if not isinstance(self.units_per_s, int | float) or not 0 < self.units_per_s < 1e12:
            raise TraceError(f"{KEY} {name}: its units_per_s must be a number above 0")

    def _whole(self, parser: Any, attribute: str) -> int:
        value = getattr(parser, attribute, 0)
        if not isinstance(value, int) or value < 0:
            raise TraceError(f"{KEY} {self.format}: its {attribute} must be a whole number >= 0")
        return value

    def parse(self, line: bytes) -> ParsedRow | None:
        """Raises LineError, whatever the user's parser does."""
        try:
            found = self._parse(line)
        except LineError:
            raise
        except Exception as error:
            text = f"{self.format} fails with {type(error).__name__}: {error}"
            raise LineError(" ".join(text.split())) from error
        return None if found is None else self._checked(found)

    def _checked(self, found: Any) -> ParsedRow:
        try:
            row = self._parsed(found) if isinstance(found, TraceRow) else ParsedRow(*found)
        except TypeError:
            raise LineError(
                f"{self.format} returned {type(found).__name__}: it must return None, a TraceRow,"
                " or (time, input_tokens, output_tokens), then hash_ids, session, tenant and"
                " priority if it has them"
            ) from None
        if not isinstance(row.time, int | float) or not isfinite(row.time):
            raise LineError(f"{self.format} returned the time {row.time!r}, which is no number")
        for what, tokens in (("prompt", row.input_tokens), ("answer", row.output_tokens)):
            if not isinstance(tokens, int) or not 0 < tokens <= MAX_LENGTH_TOKENS:
                raise LineError(
                    f"{self.format} returned {tokens!r} tokens of {what}: give a whole number from"
                    f" 1 to {MAX_LENGTH_TOKENS:,}, or return None to leave the line out"
                )
        ids = tuple(row.hash_ids)
        self._check_ids(ids, row.input_tokens)
        if not isinstance(row.priority, int):
            raise LineError(
                f"{self.format} returned the priority {row.priority!r}: give a whole number"
            )
        self._check_waits(row)
        return row._replace(hash_ids=ids, session=str(row.session), tenant=str(row.tenant))

    def _parsed(self, row: TraceRow) -> ParsedRow:
        """`arrived_s` is in seconds, whatever the unit of the parser's times."""
        time = row.arrived_s
        if isinstance(time, int | float):
            time = time * self.units_per_s
        return ParsedRow(
            time,
            row.input_tokens,
            row.output_tokens,
            row.hash_ids,
            row.session,
            row.tenant,
            row.priority,
            row.call,
            row.after,
            # a delay without calls would count as a pause of the session
            row.delay_s if row.after else None,
            row.parent,
            row.tool,
            slo_class=row.slo_class,
        )

    def _check_waits(self, row: ParsedRow) -> None:
        names = (row.call, row.parent, row.tool, *row.after)
        if not isinstance(row.after, tuple) or not all(isinstance(name, str) for name in names):
            raise LineError(
                f"{self.format} returned the call {row.call!r} after {row.after!r}: give call,"
                " parent and tool as text, and after as a tuple of calls"
            )
        delay_s = row.delay_s
        if delay_s is not None and not (isinstance(delay_s, int | float) and 0 <= delay_s < inf):
            raise LineError(f"{self.format} returned the delay_s {delay_s!r}: give seconds >= 0")

    def _check_ids(self, ids: tuple[Any, ...], input_tokens: int) -> None:
        if not self.block_tokens:
            if ids:
                raise LineError(f"{self.format} returned hash_ids: say how long blocks are, too")
            return
        num_blocks = -(-input_tokens // self.block_tokens)
        if len(ids) != num_blocks or not all(isinstance(i, int) and 0 <= i < 2**63 for i in ids):
            raise LineError(
                f"{self.format} returned {len(ids)} hash_ids: {input_tokens:,} tokens in blocks of"
                f" {self.block_tokens} need {num_blocks}, each a whole number >= 0"
            )
