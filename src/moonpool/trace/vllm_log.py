"""Reads vLLM's own log as a trace: its lines about requests that came, and about their answers.

The arrival and the prompt are in `Received request ID: ...`, or with VLLM_LOGGING_LEVEL=DEBUG in
`Request ID details: ...`; the answer in `Generated response ID: ...`. Each of these lines has the
token ids, which are counted. So vLLM must run with --enable-log-requests and --enable-log-outputs,
and without --max-log-len. A line may be text as vLLM writes it, or an object with a `message`, as a
logging configuration makes it.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from moonpool.trace.row import OTHER_LINE, LineError, ParsedRow
from moonpool.trace.table import AZURE_UNITS_PER_S, DatedTime
from moonpool.types import MALFORMED

OF_VLLM = re.compile(
    rb"Received request |Generated response |vLLM API server"
    rb"|\[(?:api_server|logger|launcher)\.py:\d"
)
_ASKED = re.compile(r"(?:Received request (\S+)|Request (\S+) details): ")
_ANSWERED = re.compile(r"Generated response (\S+?)( \([^)]*\))?: ")
_SHORT_DATE = re.compile(r"\b(\d\d-\d\d) (\d\d:\d\d:\d\d)\b")
_TIMES = ("timestamp", "asctime", "time", "@timestamp", "created")
_YEAR = "2000-"
"""A line of vLLM's log has no year."""
MAX_REQUESTS = 1_000_000
"""The most requests whose arrivals are kept, until their answers come and afterwards."""


class VllmLogParser:
    """Joins the two lines of a request: the row comes with the second."""

    format = "vllm"
    header_lines = 0
    block_tokens = 0
    units_per_s = float(AZURE_UNITS_PER_S)
    ignored: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._asked: dict[str, tuple[int, int]] = {}
        self._dated = DatedTime()
        self._num_uncounted = 0

    def parse(self, line: bytes) -> ParsedRow | None:
        """Raises LineError for an invalid time, an id of two requests, or too many requests."""
        text, moment = _message(line)
        asked = _ASKED.search(text)
        if asked is not None:
            self._note(asked[1] or asked[2], text, moment)
            return OTHER_LINE
        answered = _ANSWERED.search(text)
        if answered is None or "delta" in (answered[2] or ""):
            return OTHER_LINE
        num_output = _num_ids(text, "output_token_ids: ")
        known = self._asked.get(answered[1])
        if known is None or num_output is None:
            self._num_uncounted += num_output is None
            return OTHER_LINE
        time, num_input = known
        return ParsedRow(time, num_input, num_output) if num_input and num_output else None

    def _note(self, request_id: str, text: str, moment: str) -> None:
        num_tokens = _num_ids(text, "prompt_token_ids: ")
        if num_tokens is None:
            self._num_uncounted += 1
            return
        try:
            found = int(self._dated(moment.replace(",", ".").encode())), num_tokens
        except LineError:
            raise LineError(f"{moment!r:.40} is not a time; it must be a date") from None
        # The file is read twice, and then not in order.
        if self._asked.setdefault(request_id, found) != found:
            raise LineError(f"the request {request_id:.40} comes twice: keep one run of the server")
        if len(self._asked) > MAX_REQUESTS:
            raise LineError(f"more than {MAX_REQUESTS:,} requests: split the log")

    def why_none(self) -> str:
        """Says why the log has no request."""
        lacks = "has no line with the token ids of a prompt and of its answer"
        if self._num_uncounted:
            lacks = f"leaves out the token ids of {self._num_uncounted:,} prompts or answers"
        return (
            f"this is vLLM's log, which {lacks}; start vLLM with --enable-log-requests,"
            " --enable-log-outputs and VLLM_LOGGING_LEVEL=DEBUG (it logs no ids of streamed"
            " answers), or take the log of moonpool in front of it: serve --vllm URL --log-requests"
            " --log-format json"
        )


def is_vllm_log(lines: list[bytes]) -> bool:
    """Whether these are lines of vLLM's log."""
    return any(OF_VLLM.search(line) for line in lines)


def _message(line: bytes) -> tuple[str, str]:
    """Returns what a line says, and its time as text."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
    except MALFORMED:
        text = line.decode("utf-8", "replace")
        date = _SHORT_DATE.search(text)
        return text, f"{_YEAR}{date[1]} {date[2]}" if date else ""
    moments = (fields.get(name) for name in _TIMES)
    moment = next((each for each in moments if isinstance(each, str)), "")
    return str(fields.get("message", "")), moment


def _num_ids(text: str, name: str) -> int | None:
    """How many ids the list behind the last `name` has: texts of users stand before it."""
    ids, bracket, _ = text.rpartition(name)[2].partition("]")
    if not bracket or not ids.startswith("["):
        return None
    return ids.count(",") + 1 if ids.strip("[ ") else 0
