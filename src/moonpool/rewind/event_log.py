"""The Conductor's events with their times, in bounded memory, and the file that holds them.

The log is a chain of at most two segments. A segment begins with the state of the Conductor, the
first one with none, and holds the events since then. When a segment is full, the driver starts the
next one, and the segment before it is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from moonpool.conductor.actions import (
    CacheDropRequested,
    ConductorAction,
    ConductorEvent,
    DeadlineMoved,
    DrainRequested,
    HotRequested,
    InstanceCrashed,
    InstanceForgotten,
    InstanceJoined,
    InstanceLost,
    InstancesExpected,
    InstancesLaunched,
    InstancesWanted,
    Refuse,
    Reported,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RequestFinished,
    Send,
    Tick,
)
from moonpool.config.tables import ConductorConfig
from moonpool.framing import Framing
from moonpool.protocol.messages import (
    Abort,
    Command,
    ReserveDecode,
    StartDecode,
    StartPrefill,
    StopReceiving,
)
from moonpool.types import Slo

MAGIC = b"moonpool event log 1\n"
DEFAULT_BYTES = 32 << 20
MAX_FILE_BYTES = 1 << 30
_KINDS: tuple[type[ConductorEvent], ...] = (
    Reported,
    Tick,
    RequestArrived,
    RequestCancelled,
    InstanceJoined,
    InstanceLost,
    DrainRequested,
    HotRequested,
    CacheDropRequested,
    InstancesExpected,
    InstanceCrashed,
    RequestFinished,
    InstancesLaunched,
    InstanceForgotten,
    DeadlineMoved,
)
_NUMBER_OF = {kind: number for number, kind in enumerate(_KINDS)}
_ENTRIES = Framing("<")


class EventLogError(Exception):
    """The bytes are not an event log that this release can replay; one line says why."""


class LoggedEvent(msgspec.Struct, frozen=True):
    """An event, the time when the Conductor received it, and the decisions that followed."""

    now: float
    event: ConductorEvent
    decisions: tuple[str, ...]


class Segment(msgspec.Struct):
    """Events since a state. `checkpoint` is that state: b"" for a new Conductor, and None until it
    is known."""

    checkpoint: bytes | None = b""
    entries: bytearray = msgspec.field(default_factory=bytearray)


class EventLogFile(msgspec.Struct, frozen=True):
    """The data that a replay needs. `wall_s`: the wall clock's time less the Conductor's."""

    release: str
    incarnation: str = msgspec.field(name="life")
    config: ConductorConfig
    slo: Slo
    tenant_weights: dict[str, float]
    wall_s: float
    segments: tuple[Segment, ...]
    tenant_caches: dict[str, float] = {}  # empty in logs of earlier releases


class EventLog:
    """Takes each event. `full` tells the driver to start a new segment with `begin`."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        """`max_bytes`: the limit of both segments, without their checkpoints; 0 means that nothing
        is kept."""
        self.max_segment_bytes = max_bytes // 2
        self.segments: list[Segment] = [Segment()]
        # lists stand for any sequence of token ids
        self._encoder = msgspec.msgpack.Encoder(enc_hook=list)

    @property
    def full(self) -> bool:
        return len(self.segments[-1].entries) > self.max_segment_bytes > 0

    def note(self, event: ConductorEvent, now: float, actions: Sequence[ConductorAction]) -> None:
        """Appends an event and the decisions among its actions, unless nothing is kept."""
        if self.max_segment_bytes:
            self.note_decided(event, now, decisions(actions) if actions else ())

    def note_decided(self, event: ConductorEvent, now: float, decided: tuple[str, ...]) -> None:
        """Appends an event and what was decided."""
        entry = self._encoder.encode((now, _NUMBER_OF[type(event)], event, decided))
        self.segments[-1].entries += _ENTRIES.framed(entry)

    def begin(self) -> Segment:
        """Starts a segment and forgets all but the one before it. The driver sets its checkpoint
        to the state that the Conductor has now."""
        segment = Segment(checkpoint=None)
        self.segments = [self.segments[-1], segment]
        return segment

    def replayable(self) -> tuple[Segment, ...]:
        """The segments from the first one whose state is known."""
        for number, segment in enumerate(self.segments):
            if segment.checkpoint is not None:
                return tuple(self.segments[number:])
        return ()


def decisions(actions: Sequence[ConductorAction]) -> tuple[str, ...]:
    """Returns the decisions as short lines: commands to instances, refusals and ends of
    requests."""
    found = []
    for action in actions:
        match action:
            case Send():
                command = action.command
                attempt_id = _attempt_of(command)
                found.append(f"{action.instance_id} {type(command).__name__} {attempt_id}")
            case Refuse():
                found.append(f"refuse {action.request_id} {action.refusal.reason}")
            case RequestEnded():
                found.append(f"ended {action.record.request_id} {action.record.outcome}")
            case InstancesWanted():
                found.append(f"wanted {action.prefill} {action.decode}")
    return tuple(found)


def _attempt_of(command: Command) -> str:
    """Returns the id of the attempt that a command is about, or "" if it is about none."""
    match command:
        case StartPrefill() | ReserveDecode():
            return command.attempt.attempt_id
        case StartDecode() | StopReceiving() | Abort():
            return command.attempt_id
        case _:
            return ""


def write_file(
    log: EventLog,
    release: str,
    incarnation: str,
    config: ConductorConfig,
    slo: Slo,
    tenant_weights: Mapping[str, float],
    tenant_caches: Mapping[str, float],
    wall_s: float,
) -> bytes:
    """Returns the bytes of a file."""
    file = EventLogFile(
        release,
        incarnation,
        config,
        slo,
        dict(tenant_weights),
        wall_s,
        log.replayable(),
        dict(tenant_caches),
    )
    return MAGIC + msgspec.msgpack.encode(file)


def read_file(data: bytes) -> EventLogFile:
    """Raises EventLogError."""
    if not data.startswith(MAGIC):
        raise EventLogError("it does not begin as an event log; `moonpool rewind URL` fetches one")
    try:
        file = msgspec.msgpack.decode(data[len(MAGIC) :], type=EventLogFile)
    except (msgspec.DecodeError, RecursionError) as error:
        raise EventLogError(f"it is damaged: {error}") from None
    if not file.segments or file.segments[0].checkpoint is None:
        raise EventLogError("it holds no events")
    return file


def read_events(segment: Segment) -> Iterator[LoggedEvent]:
    """Yields the events of a segment. Raises EventLogError."""
    outer = msgspec.msgpack.Decoder(tuple[float, int, msgspec.Raw, tuple[str, ...]])
    decoders = [msgspec.msgpack.Decoder(kind) for kind in _KINDS]
    entries = bytearray(segment.entries)
    for entry in _ENTRIES.pop_all(entries):
        try:
            now, number, body, decided = outer.decode(entry)
            event = decoders[number].decode(body)
        except (msgspec.DecodeError, IndexError, RecursionError) as error:
            raise EventLogError(f"it has a damaged event: {error}") from None
        yield LoggedEvent(now, event, decided)
    if entries:
        raise EventLogError("it is cut off in the middle of an event")
