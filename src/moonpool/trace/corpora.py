"""Public corpora of agents, in which each line is a whole program.

* Weka's coding agents (github.com/callanjfox/kv-cache-tester): one conversation with its requests,
  their blocks and pauses, and sub-agents within it. `jq -c . traces/*.json > corpus.jsonl` joins a
  folder of such files. The programs have no start times: all begin at once, unless a run is told
  how many run at a time.
* Sessions of OpenTelemetry spans, as llm-d's and LMCache's agentic traces are: the spans that have
  tokens are calls, and a call waits for those that had ended when it began. A session begins at the
  time of its first call.
* AIPerf's conversations, with the text of each of their `turns`.

Blocks belong to one conversation, except for the definitions of tools: Weka's conversations whose
definitions are equally long share these. Weka's corpora whose `hash_id_scope` is "global" share all
equal ids. Two lines with one name, as of two files, are two programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from heapq import heappop, heappush
from math import isfinite
from typing import Any

import msgspec

from moonpool.trace.agent_rows import Milliseconds
from moonpool.trace.programs import SESSION_BLOCK_TOKENS, block_id
from moonpool.trace.prompt_texts import (
    KnownPrompt,
    answer_tokens,
    as_json,
    body_prompt,
    content_text,
    message_text,
    text_prompt,
)
from moonpool.trace.row import MAX_LENGTH_TOKENS, UNTIMED, LineError, ParsedRow, damage
from moonpool.trace.table import EPOCH_S
from moonpool.types import MALFORMED

CallSpan = tuple[float, float, dict[str, Any], dict[str, Any]]
"""Begin, end, span and attributes of a call."""
MAX_NESTED = 8
"""Sub-agents within sub-agents."""
_INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
_OUTPUT = (
    *("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    "llm.token_count.completion",
)
_BEGIN = ("start_time", "startTimeUnixNano", "start_time_unix_nano", "start")
_END = ("end_time", "endTimeUnixNano", "end_time_unix_nano", "end")
_BEFORE_TEXTS = ("gen_ai.tool.definitions", "gen_ai.system_instructions")
_TEXTS = ("gen_ai.input.messages", "gen_ai.prompt", "input.value", "llm.input_messages")


def is_weka(first: dict[str, Any]) -> bool:
    """Whether a file's first object is one of Weka's conversations."""
    return isinstance(first.get("requests"), list) and "block_size" in first


def is_spans(first: dict[str, Any]) -> bool:
    """Whether a file's first object is a session of spans."""
    return isinstance(first.get("spans"), list)


def is_turns(first: dict[str, Any]) -> bool:
    """Whether a file's first object is one of AIPerf's conversations."""
    return isinstance(first.get("turns"), list)


class ProgramNames:
    """Gives the programs of a file names that no two of them share."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def take(self, name: str) -> str:
        self._counts[name] += 1
        count = self._counts[name]
        return name if count == 1 else self.take(f"{name}~{count}")


class ProgramLines:
    """The common part of parsers of files with one program per line."""

    header_lines = 0
    units_per_s = 1.0
    block_tokens = SESSION_BLOCK_TOKENS
    ignored: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._names = ProgramNames()

    def begin(self) -> None:
        """Notes that a pass over the file begins, so that all names are free again."""
        self._names = ProgramNames()


class WekaParser(ProgramLines):
    """Parses one conversation per line."""

    format = "weka"

    def __init__(self, first: dict[str, Any]) -> None:
        """Raises LineError for an invalid block size."""
        super().__init__()
        self.block_tokens = whole_length(first, "block_size")
        if not self.block_tokens:
            raise LineError("block_size is 0; it must be the number of tokens of a block")

    def parse_program(self, line: bytes) -> Sequence[ParsedRow]:
        """Raises LineError."""
        whole = line_object(line)
        if whole.get("block_size") != self.block_tokens:
            raise LineError(
                f"block_size is {whole.get('block_size')!r:.40}, in the first line it is"
                f" {self.block_tokens}"
            )
        name = self._names.take(str(whole.get("id") or block_id(line)))
        num_shared = whole_length(whole, "tool_tokens", 0) // self.block_tokens
        if whole.get("hash_id_scope") == "global":
            num_shared = MAX_LENGTH_TOKENS
        rows: list[ParsedRow] = []
        self._add(rows, _list(whole, "requests"), name, "", (), num_shared, 0)
        return rows

    def _add(
        self,
        rows: list[ParsedRow],
        requests: list[Any],
        session: str,
        parent: str,
        after: tuple[str, ...],
        num_shared: int,
        depth: int,
    ) -> str:
        """Adds the calls of an agent, the first one after the named calls; returns its last
        call."""
        if depth > MAX_NESTED:
            raise LineError(f"sub-agents are nested deeper than {MAX_NESTED}")
        last, last_end_s = "", 0.0
        waits_for = after
        for number, request in enumerate(requests):
            if not isinstance(request, dict):
                raise LineError(f"request {number + 1} of {session} is no object")
            if request.get("type") == "subagent":
                inner = _list(request, "requests")
                child = f"{session}/{request.get('agent_id') or number}.{number}"
                begun = (last,) if last else after
                ended = self._add(rows, inner, child, session, begun, num_shared, depth + 1)
                if ended and request.get("status") != "async_launched":
                    waits_for = (*waits_for, ended)
                continue
            num_input, num_output = whole_length(request, "in"), whole_length(request, "out")
            begin_s = duration(request, "t") or 0.0
            # the call is counted, but no other call waits for it
            if not num_input or not num_output:
                rows.append(ParsedRow(UNTIMED, 0, 0, session=session, after=waits_for))
                continue
            think_s = duration(request, "think_time")
            if think_s is None:
                think_s = max(begin_s - last_end_s, 0.0) if last else 0.0
            call = f"{session}#{number}"
            rows.append(
                ParsedRow(
                    UNTIMED,
                    num_input,
                    num_output,
                    self._blocks(request, num_input, session, num_shared),
                    session,
                    call=call,
                    after=waits_for,
                    delay_s=think_s,
                    parent=parent,
                )
            )
            last, waits_for = call, (call,)
            last_end_s = begin_s + (duration(request, "api_time") or 0.0)
        return last

    def _blocks(
        self, request: dict[str, Any], num_tokens: int, session: str, num_shared: int
    ) -> tuple[int, ...]:
        """Returns the ids of a prompt's blocks, unique in the whole corpus."""
        ids = request.get("hash_ids") or []
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise LineError(f"hash_ids of a request of {session} is not a list of integers")
        num_blocks = -(-num_tokens // self.block_tokens)
        if not ids:  # without ids, each prompt of the agent continues the previous one
            return tuple(block_id(f"{session}//{i}".encode()) for i in range(num_blocks))
        if len(ids) < num_tokens // self.block_tokens or len(ids) > num_blocks:
            raise LineError(
                f"{len(ids)} hash_ids for {num_tokens} tokens in blocks of {self.block_tokens}"
            )
        root = session.partition("/")[0]
        found = [block_id(f"tools/{num_shared}/{one}".encode()) for one in ids[:num_shared]]
        found += [block_id(f"{root}/{one}".encode()) for one in ids[num_shared:]]
        if len(found) < num_blocks:  # adds the id of the last, partial block
            found.append(block_id(f"{session}/{num_tokens}/{ids[-1] if ids else 0}/end".encode()))
        return tuple(found)


class SpansParser(ProgramLines):
    """Parses one session of OpenTelemetry spans per line."""

    format = "spans"
    _from_1970: bool | None = None

    def parse_program(self, line: bytes) -> Sequence[ParsedRow]:
        """Raises LineError."""
        whole = line_object(line)
        named = whole.get("trace_id") or whole.get("session_id") or block_id(line)
        name = self._names.take(str(named))
        calls = list(calls_of(_list(whole, "spans")))
        for begin_s, *_ in calls:
            from_1970 = begin_s >= EPOCH_S
            if self._from_1970 not in (None, from_1970):
                raise LineError(
                    "the times of this file count partly from 1970 and partly from its start; split"
                    " it"
                )
            self._from_1970 = from_1970
        return session_rows(name, calls)


def session_rows(name: str, found: Iterable[CallSpan], exact: bool = False) -> list[ParsedRow]:
    """Orders the calls of a session by their times: each waits for those that had ended when it
    began. A call that waits for none begins with the first one, or at its own time if `exact`.
    Calls without a prompt or an answer are pauses, and are sorted after the others."""
    by_time = sorted(found, key=lambda call: call[:2])
    calls = [one for one in by_time if _tokens(one[3], _INPUT) and _tokens(one[3], _OUTPUT)]
    rows: list[ParsedRow] = []
    under_way: list[tuple[float, int]] = []  # a heap of (end, place of the call)
    # Of the ended calls, keeps only those for which no other ended call waited, because these imply
    # the others.
    last: dict[str, int] = {}
    latest = 0.0
    for number, (begin_s, end_s, span, attributes) in enumerate(calls):
        while under_way and under_way[0][0] <= begin_s:
            latest, place = heappop(under_way)
            for call in rows[place].after:
                last.pop(call, None)
            last[rows[place].call] = place
        waits_for = tuple(sorted(last, key=last.__getitem__))
        num_input, num_output = _tokens(attributes, _INPUT), _tokens(attributes, _OUTPUT)
        rows.append(
            ParsedRow(
                UNTIMED if waits_for else (begin_s if exact else calls[0][0]),
                num_input,
                num_output,
                _span_blocks(name, attributes, num_input),
                name,
                call=f"{name}#{number}",
                after=waits_for,
                delay_s=begin_s - latest if waits_for else None,
                tool=str(span.get("tool", "")),
            )
        )
        heappush(under_way, (end_s, number))
    rows += [ParsedRow(UNTIMED, 0, 0, session=name)] * (len(by_time) - len(calls))
    return rows


def _span_blocks(name: str, attributes: dict[str, Any], num_tokens: int) -> tuple[int, ...]:
    """Returns the blocks of a span's prompt: from its text if the span has it, or else as a
    continuation of the previous prompt."""
    num_blocks = -(-num_tokens // SESSION_BLOCK_TOKENS)
    found = next((attributes[key] for key in _TEXTS if key in attributes), None)
    if found is None:
        return tuple(block_id(f"{name}/{i}".encode()) for i in range(num_blocks))
    before = [attributes[key] for key in _BEFORE_TEXTS if attributes.get(key)]
    parts = (one if isinstance(one, str) else as_json(one) for one in (*before, found))
    text = "".join(parts)
    ids = text_prompt(text).block_ids or (block_id(name.encode()),)
    # The text is cut to the length in tokens, whatever text a token has.
    per_block = len(ids) / num_blocks
    return tuple(
        block_id(b"%d/%d" % (ids[min(int((i + 1) * per_block), len(ids)) - 1], i))
        if (i + 1) * per_block >= 1
        else block_id(f"{name}/{i}".encode())
        for i in range(num_blocks)
    )


class TurnsParser:
    """Parses one of AIPerf's conversations per line. A turn adds its text to the prompt and the
    answer before it, and starts `delay` milliseconds after that answer; without `delay`, after the
    difference of their timestamps."""

    format = "turns"
    header_lines = 0
    units_per_s = 1000.0
    block_tokens = SESSION_BLOCK_TOKENS
    ignored: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._milliseconds = Milliseconds()

    def begin(self) -> None:
        """Does nothing, because a conversation may continue in another line."""

    def parse_program(self, line: bytes) -> Sequence[ParsedRow]:
        """Raises LineError."""
        whole = line_object(line)
        name = str(whole.get("session_id") or whole.get("trace_id") or block_id(line))
        rows: list[ParsedRow] = []
        system, last = "", UNTIMED
        for number, turn in enumerate(_list(whole, "turns")):
            if not isinstance(turn, dict):
                raise LineError(f"turn {number + 1} of {name} is no object")
            if turn.get("role") == "system" and not rows:
                system += _turn_text(turn)
                continue
            stamp = turn.get("timestamp")
            time = UNTIMED if stamp is None else milliseconds_of(stamp, self._milliseconds)
            delay_ms = duration(turn, "delay", "ms")
            if delay_ms is None and UNTIMED not in (last, time):
                delay_ms = max(time - last, 0.0)
            last = time
            prompt, system = self._prompt(turn, system), ""
            rows.append(
                ParsedRow(
                    UNTIMED if rows else time,
                    prompt.num_tokens,
                    self._answer(turn),
                    prompt.block_ids,
                    name,
                    delay_s=None if delay_ms is None else delay_ms / 1000.0,
                    adds="payload" not in turn,
                )
            )
        return rows

    def _prompt(self, turn: dict[str, Any], system: str) -> KnownPrompt:
        if turn.get("input_length") is not None:
            return KnownPrompt(
                whole_length(turn, "input_length") + text_prompt(system).num_tokens, ()
            )
        if isinstance(turn.get("payload"), dict):
            return body_prompt(turn["payload"])
        return text_prompt(system + _turn_text(turn))

    def _answer(self, turn: dict[str, Any]) -> int:
        if turn.get("output_length") is not None:
            return whole_length(turn, "output_length")
        inner = turn.get("extra") or turn.get("payload")
        found = answer_tokens(turn) or answer_tokens(inner if isinstance(inner, dict) else {})
        return int(found or 1)


def _turn_text(turn: dict[str, Any]) -> str:
    """The text of a turn: `text`, `texts`, or messages as in a chat."""
    if isinstance(turn.get("messages"), list):
        return message_text(turn["messages"], turn.get("tools"))
    parts = turn.get("text", turn.get("texts", turn.get("content")))
    return content_text(parts)


def calls_of(spans: list[Any]) -> Iterator[CallSpan]:
    """Begin, end, span and attributes of the spans that have tokens of a prompt or an answer."""
    for span in spans:
        if not isinstance(span, dict):
            raise LineError("a span is no object")
        attributes = span.get("attributes") or {}
        if isinstance(attributes, list):  # the form in which OTLP writes attributes
            attributes = {
                one["key"]: _plain(one.get("value"))
                for one in attributes
                if isinstance(one, dict) and isinstance(one.get("key"), str)
            }
        attributes = {**span, **attributes}
        if not _tokens(attributes, _INPUT) and not _tokens(attributes, _OUTPUT):
            continue
        begin_s = _instant(span, _BEGIN)
        # No call waited for one that never ended: the next calls follow its beginning.
        has_end = any(span.get(name) not in (None, "", 0, "0") for name in _END)
        end_s = _instant(span, _END) if has_end else begin_s
        yield begin_s, max(end_s, begin_s), span, attributes


def _plain(value: Any) -> Any:
    """The value in one of OTLP's wrappers."""
    return next(iter(value.values()), None) if isinstance(value, dict) else value


def _tokens(attributes: dict[str, Any], names: Sequence[str]) -> int:
    value = next((attributes[name] for name in names if attributes.get(name) is not None), 0)
    try:
        if isinstance(value, bool) or not float(value).is_integer():
            raise ValueError
        number = int(float(value))
    except (TypeError, ValueError, OverflowError):
        raise LineError(f"{names[0]} is {value!r:.40}; it must be an integer") from None
    if not 0 <= number <= MAX_LENGTH_TOKENS:
        raise LineError(f"{names[0]} is {number}; it must be between 0 and {MAX_LENGTH_TOKENS}")
    return number


def _instant(span: dict[str, Any], names: Sequence[str]) -> float:
    """Seconds since 1970 or since the start of the trace."""
    value = next((span[name] for name in names if span.get(name) is not None), None)
    try:
        if isinstance(value, str) and not value.replace(".", "", 1).isdigit():
            return datetime.fromisoformat(value).timestamp()
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise LineError(f"{names[0]} of a span is {value!r:.40}; it must be a time") from None
    if not isfinite(number) or number < 0:
        raise LineError(f"{names[0]} of a span is {value!r:.40}; it must be a time")
    for unit in (1e17, 1e14, 1e11):  # units since 1970: nanoseconds, microseconds, milliseconds
        if number >= unit:
            return number / (unit / 1e8)
    return number


def line_object(line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except MALFORMED as error:
        raise LineError(
            damage(line)
            or f"this line is not one JSON object ({error}); put each on one line by `jq -c . FILE`"
        ) from None


def _list(fields: dict[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise LineError(f"{name} is {value!r:.40}; it must be a list")
    return value


def whole_length(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    """Raises LineError."""
    value = fields.get(name, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value <= MAX_LENGTH_TOKENS:
        raise LineError(f"{name} is {value!r:.40}; it must be an integer, 0 or more")
    return value


def milliseconds_of(value: Any, read: Milliseconds) -> float:
    """The time of a row. Raises LineError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, str) and not (is_number and 0 <= value < float("inf")):
        raise LineError(f"timestamp is {value!r:.40}; it must be milliseconds, or a date")
    return read(value)


def duration(fields: dict[str, Any], name: str, unit: str = "seconds") -> float | None:
    """Returns None if the field is absent. Raises LineError."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e12:
        raise LineError(f"{name} is {value!r:.40}; it must be {unit}")
    return max(float(value), 0.0)  # clocks that were set back lead to negative durations
