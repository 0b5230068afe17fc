"""Runs a Conductor over the events of a log and compares its decisions with those of the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from moonpool.conductor.actions import RequestArrived, RequestEnded
from moonpool.conductor.conductor import Conductor
from moonpool.plugins.policies import load_policies, own_classes
from moonpool.protocol.block_layout import block_keys, root_key
from moonpool.request_record import RequestRecord
from moonpool.rewind.event_log import EventLogError, EventLogFile, decisions, read_events
from moonpool.rewind.snapshot import SnapshotError, load
from moonpool.types import BlockKey, Request

MAX_LISTED = 20
TRACE_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Difference:
    """An event at which the replay decided differently from the log."""

    number: int  # number of the event
    at_s: float  # seconds since the first event
    logged: tuple[str, ...]
    replayed: tuple[str, ...]


class LoggedArrival(NamedTuple):
    request: Request
    keys: Sequence[BlockKey]  # keys of the prompt's full blocks
    block_tokens: int


@dataclass(slots=True)
class Replay:
    """One pass over a log: iterate, and look at `conductor` in between."""

    file: EventLogFile
    conductor: Conductor = field(init=False)
    num_events: int = 0
    num_decisions: int = 0
    first_s: float | None = None
    now: float = 0.0
    differences: list[Difference] = field(default_factory=list)  # only the first differences
    num_differences: int = 0
    arrivals: list[LoggedArrival] = field(default_factory=list)
    ended: dict[str, tuple[RequestRecord, tuple[str, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        file = self.file
        policies = load_policies(file.config)
        checkpoint = file.segments[0].checkpoint
        if not checkpoint:
            self.conductor = Conductor(
                file.config,
                file.incarnation,
                file.slo,
                policies,
                file.tenant_weights,
                file.tenant_caches,
            )
            return
        try:
            found: Any = load(checkpoint, own_classes(policies))
        except SnapshotError as error:
            raise EventLogError(f"its state cannot be read: {error}") from None
        if not isinstance(found, Conductor):
            raise EventLogError("its state is not that of a Conductor")
        self.conductor = found

    def run(self) -> Iterator[float]:
        """Yields the Conductor's time after each event. Raises EventLogError."""
        for segment in self.file.segments:
            for logged in read_events(segment):
                self.first_s = logged.now if self.first_s is None else self.first_s
                self.now = logged.now
                self._handle(logged.event, logged.decisions)
                yield self.now

    def _handle(self, event: Any, logged: tuple[str, ...]) -> None:
        if isinstance(event, RequestArrived):
            self.arrivals.append(self._arrival(event.request))
        try:
            actions = self.conductor.handle(event, self.now)
        except Exception as error:
            text = f"event {self.num_events}: the Conductor raised {type(error).__name__}: {error}"
            raise EventLogError(text) from error
        replayed = decisions(actions)
        if replayed != logged:
            self.num_differences += 1
            if len(self.differences) < MAX_LISTED:
                at_s = self.now - (self.first_s or 0.0)
                self.differences.append(Difference(self.num_events, at_s, logged, replayed))
        self.num_events += 1
        self.num_decisions += len(replayed)
        for action in actions:
            if isinstance(action, RequestEnded):
                lines = action.explanation.lines()
                self.ended[action.record.request_id] = action.record, tuple(lines)

    def _arrival(self, request: Request) -> LoggedArrival:
        for state in self.conductor.instances.values():
            layout = state.info.layout
            keys: Sequence[BlockKey] = request.keys or ()
            if request.keys is None and request.use_cache:
                root = root_key(layout.fingerprint, request.tenant, request.adapter)
                keys = block_keys(request.token_ids, layout.block_tokens, root)
            return LoggedArrival(request, keys, layout.block_tokens)
        return LoggedArrival(request, (), 0)


def trace_lines(
    arrivals: Sequence[LoggedArrival], output_tokens: Mapping[str, int]
) -> Iterator[bytes]:
    """The arrivals as a trace in Bailian's format, for `simulate`: seconds and block ids.

    `output_tokens`: the answer's length by request id; a request that is missing there counts with
    its limit.
    """
    ids: dict[Any, int] = {}
    first_s = arrivals[0].request.arrived_s if arrivals else 0.0
    for number, arrival in enumerate(arrivals):
        request = arrival.request
        num_full = request.num_prompt_tokens // TRACE_BLOCK_TOKENS
        names = _trace_blocks(arrival)
        # ids that no other prompt shares
        names += [(number, place) for place in range(len(names), num_full)]
        length = output_tokens.get(request.request_id, 0) or request.sampling.max_tokens
        row: dict[str, Any] = {
            "chat_id": number,
            "timestamp": round(request.arrived_s - first_s, 6),
            "input_length": request.num_prompt_tokens,
            "output_length": length,
            "hash_ids": [ids.setdefault(name, len(ids)) for name in names[:num_full]],
        }
        if request.tenant:
            row["tenant"] = request.tenant
        if request.priority:
            row["priority"] = request.priority
        if request.slo.class_name:
            row["slo_class"] = request.slo.class_name
        yield msgspec.json.encode(row) + b"\n"


def _trace_blocks(arrival: LoggedArrival) -> list[Any]:
    """Returns ids for the blocks of a trace that make up the prompt's full blocks."""
    size, keys = arrival.block_tokens, arrival.keys
    if size and TRACE_BLOCK_TOKENS % size == 0:
        each = TRACE_BLOCK_TOKENS // size
        return [(key,) for key in keys[each - 1 :: each]]
    if size % TRACE_BLOCK_TOKENS == 0:
        return [(key, place) for key in keys for place in range(size // TRACE_BLOCK_TOKENS)]
    return []
