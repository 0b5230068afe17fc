"""Logs of requests as JSON lines, written by proxies, servers and observability tools.

A request is an object that says, under one of the usual names and at any depth, when it arrived
and how many tokens its prompt and its answer have. So LiteLLM's spend logs and logging payloads,
OpenAI's responses with `created` and `usage`, runs of LangSmith, Langfuse and Helicone, flat
objects with dotted names, and moonpool's own `--log-requests --log-format json` are all read. Other
lines of a log are skipped and counted. Such a log does not tell which prompts share a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import inf, isfinite
from typing import Any, NamedTuple

import msgspec

from moonpool.trace.row import MAX_LENGTH_TOKENS, OTHER_LINE, LineError, ParsedRow, damage
from moonpool.trace.table import (
    AZURE_UNITS_PER_S,
    EPOCH_S,
    DatedTime,
    units_since_1970,
    units_since_start,
)
from moonpool.types import MALFORMED

ARRIVAL = (
    *("arrival_time", "arrived_at", "arrival", "arrival_timestamp", "received_at"),
    *("start_time", "started_at", "start_time_unix_nano", "request_start_time"),
    *("request_time", "request_timestamp", "request_created_at", "start"),
    *("timestamp", "time", "ts", "created", "created_at", "create_time", "created_time"),
    *("datetime", "date", "asctime"),
)
"""Names of the arrival, the best first: the last ones may be later instants of the same request."""
PROMPT = (
    *("prompt_tokens", "input_tokens", "input_length", "num_prompt_tokens", "num_prefill_tokens"),
    *("prompt_token_count", "input_token_count", "n_prompt_tokens", "tokens_in"),
)
ANSWER = (
    *("completion_tokens", "output_tokens", "output_length", "generated_tokens"),
    *("num_generation_tokens", "num_decode_tokens", "completion_token_count", "tokens_out"),
    *("output_token_count", "candidates_token_count", "num_completion_tokens"),
)
SESSION = ("session_id", "session", "conversation_id", "chat_id", "thread_id")
USAGE = frozenset({"usage", "usage_details", "token_usage", "usage_metadata", "token_counts"})
"""Objects in which `input` and `output` are numbers of tokens."""
_IN_USAGE = ("input", "prompt"), ("output", "completion")
_CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")
"""Fields of prompt tokens that Anthropic's `input_tokens` leaves out."""

MAX_DEPTH = 6
MAX_OBJECTS = 500
"""Most objects of one line that are searched."""
SHOWN_FIELDS = 12
MAX_NUMBER = 10**20
"""Times in nanoseconds since 1970 are below this number."""
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

Objects = list[tuple[tuple[str, ...], dict[str, Any]]]
"""The objects of a line with their paths, the outer ones first."""


class _Place(NamedTuple):
    """The places of the needed fields in lines of one shape."""

    usage: tuple[str, ...]
    prompt: str
    answer: str
    holder: tuple[str, ...]
    arrival: str


class JsonLogParser:
    """Finds the requests of a log. A line that is no request gives OTHER_LINE."""

    format = "log"
    header_lines = 0
    block_tokens = 0
    units_per_s = float(AZURE_UNITS_PER_S)
    ignored: tuple[str, ...] = ()

    def __init__(self, first_lines: Sequence[bytes] = ()) -> None:
        """The times of `first_lines` tell the unit of times that count from the log's start."""
        self._place: _Place | None = None
        self._dated = DatedTime()
        self._seen: dict[str, None] = {}
        self._found: set[str] = set()
        self._units = 1000
        self._from_1970: bool | None = None
        times = [value for line in first_lines for value in self._first_time(line)]
        self._units = units_since_start(times)

    def _first_time(self, line: bytes) -> Iterator[float]:
        fields = json_object(line)
        place = None if fields is None else _place_of(_objects(fields))
        if fields is not None and place is not None:
            value = _at(fields, place.holder).get(place.arrival)
            number = _number(value)
            if number is not None:
                yield number

    def parse(self, line: bytes) -> ParsedRow | None:
        """Raises LineError for a damaged line, and for a request with an impossible value."""
        if not line.lstrip().startswith(b"{"):
            if found := damage(line):
                raise LineError(found)
            return OTHER_LINE
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
        except MALFORMED as error:
            raise LineError(damage(line) or f"this line is not one JSON object ({error})") from None
        place = self._place
        if place is None or not _fits(fields, place):
            objects = _objects(fields)
            place = _place_of(objects)
            if place is None:
                self._note(objects)
                return OTHER_LINE
            self._place = place
        return self._row(fields, place)

    def _row(self, fields: dict[str, Any], place: _Place) -> ParsedRow | None:
        usage = _at(fields, place.usage)
        num_input = _tokens(usage, place.prompt, place.usage)
        if _plain(place.prompt) == "input_tokens":
            num_input += sum(
                _tokens(usage, name, place.usage) for name in _CACHED if usage.get(name)
            )
        num_output = _tokens(usage, place.answer, place.usage)
        time = self._time(_at(fields, place.holder)[place.arrival], place)
        if num_input == 0 or num_output == 0:
            return None
        total_s = fields.get("total_s")
        if "outcome" in fields and isinstance(total_s, int | float):
            # moonpool's own log is written at the end of a request
            time -= round(total_s * AZURE_UNITS_PER_S)
        shape = time, num_input, num_output, (), _session(fields), _text(fields, "tenant")
        slo_class = _text(fields, "slo_class")
        program = fields.get("program")
        if not isinstance(program, str) or not program or not isinstance(total_s, int | float):
            return ParsedRow(*shape, slo_class=slo_class)
        # A call of a program in our own log: the next one waits for its end.
        ended = time + round(total_s * AZURE_UNITS_PER_S)
        row = ParsedRow(*shape, ended=ended, slo_class=slo_class)
        return row._replace(session=program, parent=_text(fields, "parent_program"))

    def _time(self, value: Any, place: _Place) -> int:
        """Returns the time in units of 100 ns. Raises LineError."""
        where = _dotted(place.holder, place.arrival)
        number = _number(value)
        if number is None:
            text = value if isinstance(value, str) else ""
            try:
                return int(self._dated(text.replace(",", ".").strip().encode()))
            except LineError:
                raise LineError(
                    f"{where} is {value!r:.40}; it must be a time: seconds or milliseconds, or a"
                    " date such as 2023-11-16T18:15:46.68Z"
                ) from None
        if not isfinite(number) or number < 0:
            raise LineError(f"{where} is {value!r:.40}; it must be a finite number, 0 or more")
        from_1970 = number >= EPOCH_S
        if self._from_1970 not in (None, from_1970):
            raise LineError(
                f"{where} is {value!r:.40}: the times of this log count partly from 1970 and partly"
                " from its start; split it"
            )
        self._from_1970 = from_1970
        units = units_since_1970(number) if from_1970 else self._units
        if isinstance(number, int):
            return number * AZURE_UNITS_PER_S // units
        return round(number * (AZURE_UNITS_PER_S / units))

    def _note(self, objects: Objects) -> None:
        """Remembers what a line has that is not a request, for `why_none`."""
        for path, fields in objects:
            for name in fields:
                if len(self._seen) < SHOWN_FIELDS:
                    self._seen[_dotted(path, name)] = None
            self._found |= {role for role, name in _roles(path, fields).items() if name}

    def why_none(self) -> str:
        """Says which names were looked for and not found, which fields were there instead, and what
        to do."""
        words = {
            "arrival": f"an arrival ({', '.join(('timestamp', 'start_time', 'created'))}, ...)",
            "prompt": f"the tokens of the prompt ({', '.join(PROMPT[:3])}, ...)",
            "answer": f"the tokens of the answer ({', '.join(ANSWER[:3])}, ...)",
        }
        missing = [text for role, text in words.items() if role not in self._found]
        lacks = f"no line has {', or '.join(missing)}"
        if not missing:
            lacks = f"no line has all of {'; '.join(words.values())}"
        fields = ", ".join(self._seen) or "none, as no line is a JSON object"
        return (
            f"a log needs a JSON object for each request, and {lacks}; the fields found are"
            f" {fields}: rename them, or read the log by a parser of your own (docs/extending.md)"
        )


def json_object(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a line, or None if it has none."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except MALFORMED:
        return None


def has_arrival(fields: dict[str, Any]) -> bool:
    """Whether a line, or an object in it, says when a request came."""
    return any(_named(inner, ARRIVAL) for _, inner in _objects(fields))


def is_request(fields: dict[str, Any]) -> bool:
    """Whether a line of a log says when a request came and how many tokens it had."""
    return _place_of(_objects(fields)) is not None


def _objects(fields: dict[str, Any]) -> Objects:
    """Returns the object and the objects in it, breadth first."""
    found: Objects = [((), fields)]
    for path, own in found:  # grows meanwhile
        if len(path) == MAX_DEPTH:
            break
        for name, value in own.items():
            if isinstance(value, dict) and len(found) < MAX_OBJECTS:
                found.append(((*path, name), value))
    return found


def _place_of(objects: Objects) -> _Place | None:
    """Returns the place of the request in the line, or None if there is none."""
    for path, fields in objects:
        roles = _roles(path, fields)
        if roles["prompt"] and roles["answer"]:
            holder = _arrival_near(path, objects)
            return holder and _Place(path, roles["prompt"], roles["answer"], *holder)
    return None


def _arrival_near(usage: tuple[str, ...], objects: Objects) -> tuple[tuple[str, ...], str] | None:
    """Returns the best name of an arrival in the objects around the usage, the innermost first, or
    else in any other object; None if no object has one."""
    best: tuple[bool, int, int, tuple[str, ...], str] | None = None
    for path, fields in objects:
        name = _named(fields, ARRIVAL)
        if not name:
            continue
        is_around = usage[: len(path)] == path
        depth = -len(path) if is_around else len(path)
        rank = (not is_around, ARRIVAL.index(_plain(name)), depth, path, name)
        best = rank if best is None else min(best, rank)
    return None if best is None else best[3:]


def _roles(path: tuple[str, ...], fields: dict[str, Any]) -> dict[str, str]:
    """Returns the names in an object that have a role; "" stands for a role without a name."""
    prompt, answer = _named(fields, PROMPT), _named(fields, ANSWER)
    if path and _plain(path[-1]) in USAGE:
        prompt = prompt or _named(fields, _IN_USAGE[0])
        answer = answer or _named(fields, _IN_USAGE[1])
    return {"arrival": _named(fields, ARRIVAL), "prompt": prompt, "answer": answer}


def _named(fields: dict[str, Any], names: Sequence[str]) -> str:
    """Returns the field with the best of these names, in any spelling, or "" if none of them has a
    value."""
    plain = {
        _plain(name): name
        for name, value in fields.items()
        if value is not None and not isinstance(value, dict | list)
    }
    return next((plain[name] for name in names if name in plain), "")


def _plain(name: str) -> str:
    """Normalises names: `gen_ai.usage.inputTokens` and `Input tokens` become `input_tokens`."""
    last = name.rpartition(".")[2].strip("@ ").replace(" ", "_").replace("-", "_")
    return _CAMEL.sub("_", last).lower()


def _at(fields: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for name in path:
        fields = fields[name]
    return fields


def _dotted(path: tuple[str, ...], name: str) -> str:
    """A field as a message shows it: on one line, and not too long."""
    return f"{' '.join('.'.join((*path, name)).split()):.80}"


def _fits(fields: dict[str, Any], place: _Place) -> bool:
    """Whether a line has the shape of an earlier one."""
    for path, names in (
        (place.usage, (place.prompt, place.answer)),
        (place.holder, (place.arrival,)),
    ):
        found: Any = fields
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        if not isinstance(found, dict) or any(found.get(name) is None for name in names):
            return False
    return True


def _number(value: Any) -> float | None:
    """The number that a value is, or that its text is; infinity for a number above all times."""
    if isinstance(value, str) and len(value) <= 40:
        try:
            value = float(value) if set(value) & set(".eEnN") else int(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < MAX_NUMBER else inf


def _tokens(fields: dict[str, Any], name: str, path: tuple[str, ...]) -> int:
    """Raises LineError."""
    value = fields[name]
    number = _number(value)
    where = _dotted(path, name)
    if number is None or not isfinite(number) or not float(number).is_integer():
        raise LineError(f"{where} is {value!r:.40}; it must be an integer")
    if not 0 <= number <= MAX_LENGTH_TOKENS:
        raise LineError(f"{where} is {value!r:.40}; it must be between 0 and {MAX_LENGTH_TOKENS}")
    return int(number)


def _session(fields: dict[str, Any]) -> str:
    name = _named(fields, SESSION)
    return str(fields[name]) if name else ""


def _text(fields: dict[str, Any], name: str) -> str:
    text = fields.get(name, "")
    return text if isinstance(text, str) else ""
