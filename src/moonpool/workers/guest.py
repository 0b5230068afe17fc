"""An instance whose engine is somebody else's (vLLM): a pure state machine, like `instance`.

That engine batches, caches and evicts as it likes. What is decided here is what to ask of it and
what to tell the head: which prompt it is at, which steps its tokens came in, which blocks it holds.
Its words come piece by piece, one request each; those that come together were one step.

A prefill instance is asked for one token, and for a `handle` by which a decode instance finds the
KVCache; that draws the first token again, and must draw the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.kvcache.foreign import AssumedNames, ForeignCleared, ForeignEvent, ForeignNames
from moonpool.kvcache.hashing import extend_keys, root_key
from moonpool.kvcache.layout import BlockLayout
from moonpool.types import BlockKey, FinishReason, Role, Token
from moonpool.workers.actions import Depart, Tell
from moonpool.workers.messages import (
    Abort,
    BlocksChanged,
    BlocksSnapshot,
    Command,
    DecodeAccepted,
    HotPrefixes,
    InstanceLoad,
    Leave,
    ListHot,
    MarkCopies,
    PrefillDone,
    PrefillStarted,
    Report,
    ReserveDecode,
    Resync,
    RoleChanged,
    StartDecode,
    StartPrefill,
    StepTokens,
    StopReceiving,
    SwitchRole,
    TakenOver,
    TakeOver,
    Work,
    WorkFailed,
    WorkId,
    WorkTokens,
)

SHOWN_OWNERS = 1024
NO_HANDLE = "vLLM keeps no KVCache for others: start it with a --kv-transfer-config"


@dataclass(frozen=True, slots=True)
class Piece:
    """Of one request's answer; the last one has a `finish`. `handle`: with the only piece of a
    prefill, where its KVCache is."""

    work_id: WorkId
    tokens: tuple[Token, ...]
    finish: FinishReason | None = None
    handle: bytes = b""


@dataclass(frozen=True, slots=True)
class AskFailed:
    """There will be no more pieces of it. `refused`: there is something wrong with the request."""

    work_id: WorkId
    message: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class StepOver:
    """What came since `EndStepSoon` was asked for came together."""


@dataclass(frozen=True, slots=True)
class NamesTold:
    """What the engine says of its cache, in order. `anew`: words of it were lost, and what was said
    before is no longer to be relied on."""

    events: tuple[ForeignEvent, ...]
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """Have the engine go on with a work, from its tokens; answer with `Piece`s or `AskFailed`.
    `hands_over`: compute the prompt alone, and keep it for whoever comes with the handle.
    `handle`: where the KVCache of the prompt is."""

    work: Work
    hands_over: bool = False
    handle: bytes = b""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Nobody waits for it any more; nothing of it may come from now on."""

    work_id: WorkId


@dataclass(frozen=True, slots=True)
class EndStepSoon:
    """Answer with `StepOver` once what the engine said at the same time should be here."""


GuestEvent = Command | Piece | AskFailed | StepOver | NamesTold
GuestAction = Ask | GiveUp | EndStepSoon | Tell | Depart


@dataclass(slots=True)
class _Guest:
    work: Work
    keys: list[BlockKey]
    hands_over: bool
    first_token: Token | None = None  # drawn by who computed the prompt
    asked: bool = False
    prefilling: bool = False  # its prompt is computed here, and no token has come of it
    generated: list[int] = field(default_factory=list)


class _Coming(NamedTuple):
    tokens: list[Token]
    finish: FinishReason | None


@dataclass(slots=True)
class _Step:
    """What came together, until it is told."""

    pieces: dict[WorkId, _Coming] = field(default_factory=dict)
    decodes_alone: bool = True


class GuestInstance:
    """`num_blocks` of `layout` are what the engine has for KVCache. `tells_names`: it says what it
    caches; if not, that is assumed."""

    def __init__(
        self,
        layout: BlockLayout,
        num_blocks: int,
        role: Role,
        tells_names: bool,
        caches: bool = True,
    ) -> None:
        """`caches` False: it keeps nothing of a prompt for the next."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.role = role
        self.counters: dict[str, float] = {}
        self._told = ForeignNames(layout.fingerprint, layout.block_tokens) if tells_names else None
        self._assumed = None if tells_names else AssumedNames(num_blocks if caches else 0)
        self._works: dict[WorkId, _Guest] = {}
        self._line: dict[WorkId, None] = {}  # prompts under way, in the order they were asked for
        self._step: _Step | None = None
        self._last_step_s: float | None = None
        self._sequence = 0
        self._actions: list[GuestAction] = []

    def handle(self, event: GuestEvent, now: float) -> list[GuestAction]:
        match event:
            case Piece():
                self._on_piece(event)
            case StepOver():
                self._end_step(now)
            case StartPrefill():
                self._on_start_prefill(event)
            case ReserveDecode():
                self._add(event.work, hands_over=False)
            case StartDecode():
                self._on_start_decode(event)
            case Abort():
                self._on_abort(event.work_id)
            case AskFailed():
                reason = "refused_by_engine" if event.refused else "engine_error"
                self._fail(event.work_id, event.message, reason)
            case NamesTold():
                self._on_names_told(event)
            case Resync():
                self._names.take_changes()
                self._tell(BlocksSnapshot(next_sequence=self._sequence, keys=self._names.keys))
            case SwitchRole():
                self._tell(RoleChanged(role=self.role))  # it is what it was started as
            case ListHot():
                self._tell(HotPrefixes(number=event.number, prefixes=()))
            case TakeOver():
                error = "an engine of another kind takes no blocks"
                self._tell(TakenOver(number=event.number, num_blocks=0, error=error))
            case Leave():
                self._actions.append(Depart())
            case StopReceiving() | MarkCopies():
                pass  # the engine fetches by itself, and evicts as it likes
        self._announce()
        actions, self._actions = self._actions, []
        return actions

    def abort_all(self) -> list[GuestAction]:
        """The head is gone: nobody waits for any of the works."""
        for work_id in list(self._works):
            self._on_abort(work_id)
        actions, self._actions = self._actions, []
        return actions

    def load(self) -> InstanceLoad:
        """Gauges as they are now. Blocks that works share are counted with each, as nothing tells
        which these are."""
        owners = {}
        for work_id, guest in list(self._works.items())[:SHOWN_OWNERS]:
            num_tokens = len(guest.work.token_ids) + len(guest.generated)
            owners[f"work:{work_id}"] = self.layout.blocks_for(num_tokens)
        held = min(sum(owners.values()), self.num_blocks)
        return InstanceLoad(
            num_running=len(self._works) - len(self._line),
            num_waiting=len(self._line),
            held_blocks=held,
            cached_blocks=min(len(self._names), self.num_blocks),
            free_blocks=self.num_blocks - held,
            owners=owners,
            counters=dict(self.counters),
            num_blocks=self.num_blocks,
        )

    @property
    def _names(self) -> ForeignNames | AssumedNames:
        names = self._told if self._told is not None else self._assumed
        assert names is not None
        return names

    # Commands

    def _add(self, work: Work, hands_over: bool) -> _Guest:
        guest = _Guest(work, [], hands_over)
        self._name_blocks(guest)
        self._works[work.work_id] = guest
        return guest

    def _name_blocks(self, guest: _Guest) -> None:
        """Those that have none yet, of its prompt and its answer."""
        work = guest.work
        if work.use_cache:
            root = root_key(self.layout.fingerprint, work.tenant)
            tokens = (*work.token_ids, *guest.generated)
            extend_keys(guest.keys, tokens, self.layout.block_tokens, root)

    def _on_start_prefill(self, command: StartPrefill) -> None:
        guest = self._add(command.work, hands_over=command.target is not None)
        guest.asked = guest.prefilling = True
        self._line[command.work.work_id] = None
        self._actions.append(Ask(command.work, guest.hands_over))
        if len(self._line) == 1:
            self._begin_prefill(guest)

    def _begin_prefill(self, guest: _Guest) -> None:
        """Its turn has come, as far as can be seen from outside."""
        held, most = 0, (len(guest.work.token_ids) - 1) // self.layout.block_tokens
        for key in guest.keys[:most]:
            if not self._names.holds(key):
                break
            held += 1
        self._tell(
            PrefillStarted(
                work_id=guest.work.work_id,
                cached_tokens=held * self.layout.block_tokens,
                fetched_tokens=0,
            )
        )

    def _on_start_decode(self, command: StartDecode) -> None:
        guest = self._works.get(command.work_id)
        if guest is None or guest.asked:
            return
        guest.first_token, guest.asked = command.token, True
        self._actions.append(Ask(guest.work, handle=command.handle))

    def _on_abort(self, work_id: WorkId) -> None:
        guest = self._works.get(work_id)
        if guest is None:
            return
        if guest.asked:
            self._actions.append(GiveUp(work_id))
        self._end(guest)

    def _fail(self, work_id: WorkId, message: str, reason: str = "engine_error") -> None:
        guest = self._works.get(work_id)
        if guest is not None:
            self._count("failed_works")
            self._end(guest)
            self._tell(WorkFailed(work_id=work_id, reason=reason, message=message))

    # The engine's words

    def _on_piece(self, piece: Piece) -> None:
        guest = self._works.get(piece.work_id)
        if guest is None:
            return
        tokens = piece.tokens
        if tokens and not guest.generated:
            self._end_prefill(guest)
            if guest.first_token is not None:
                if tokens[0].token_id != guest.first_token.token_id:
                    self._actions.append(GiveUp(piece.work_id))
                    text = "its first token is not the one that was drawn with the prompt"
                    self._fail(piece.work_id, text)
                    return
                self._tell(DecodeAccepted(work_id=piece.work_id))
                tokens = tokens[1:]
        guest.generated.extend(token.token_id for token in piece.tokens)
        self._count("generated_tokens", len(piece.tokens))
        if guest.hands_over:
            self._end_handed_over(guest, piece)
        elif tokens or piece.finish is not None:
            self._gather(piece.work_id, tokens, piece.finish)

    def _end_prefill(self, guest: _Guest) -> None:
        """Its first token is here."""
        if self._assumed is not None:
            self._assumed.use(guest.keys)
        if not guest.prefilling:
            return
        guest.prefilling = False
        if self._step is not None:
            self._step.decodes_alone = False
        self._last_step_s = None  # the time since the last step was not of decodes alone
        if next(iter(self._line)) != guest.work.work_id:
            self._begin_prefill(guest)  # several share a step: it ends with those before it
        self._leave_line(guest.work.work_id)

    def _leave_line(self, work_id: WorkId) -> None:
        """If it was first, whoever comes after it is being computed."""
        was_first = next(iter(self._line), None) == work_id
        self._line.pop(work_id, None)
        if was_first and self._line:
            self._begin_prefill(self._works[next(iter(self._line))])

    def _end_handed_over(self, guest: _Guest, piece: Piece) -> None:
        if piece.finish is None:
            return
        if not piece.tokens:
            self._fail(piece.work_id, "the prefill ended without a token")
            return
        ends = piece.finish is FinishReason.STOP  # and not by the one token it was asked for
        if not ends and not piece.handle:  # else who decodes would quietly compute it all again
            self._fail(piece.work_id, NO_HANDLE)
            return
        self._end(guest)
        self._tell(
            PrefillDone(
                work_id=piece.work_id,
                token=piece.tokens[0],
                finish=piece.finish if ends else None,
                handle=piece.handle,
            )
        )

    def _gather(
        self, work_id: WorkId, tokens: Sequence[Token], finish: FinishReason | None
    ) -> None:
        if self._step is None:
            self._step = _Step(decodes_alone=not self._line)
            self._actions.append(EndStepSoon())
        coming = self._step.pieces.get(work_id, _Coming([], None))
        coming.tokens.extend(tokens)
        self._step.pieces[work_id] = _Coming(coming.tokens, finish or coming.finish)

    def _end_step(self, now: float) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        works = tuple(
            WorkTokens(work_id=work_id, tokens=tuple(coming.tokens), finish=coming.finish)
            for work_id, coming in step.pieces.items()
            if work_id in self._works
        )
        if not works:
            return
        single = all(len(item.tokens) == 1 for item in works)
        everybody = len(works) == sum(bool(guest.generated) for guest in self._works.values())
        gap_s = 0.0
        if step.decodes_alone and single and everybody and self._last_step_s is not None:
            gap_s = now - self._last_step_s
        self._last_step_s = now
        self._tell(StepTokens(works=works, gap_s=max(gap_s, 0.0)))
        for item in works:
            if item.finish is not None:
                self._end(self._works[item.work_id])

    def _on_names_told(self, told: NamesTold) -> None:
        if self._told is None:
            return
        if told.anew:
            self._count("names_lost")
            self._told.hear(ForeignCleared())
        for event in told.events:
            self._told.hear(event)

    # Both

    def _end(self, guest: _Guest) -> None:
        """It is over here, however it ended."""
        work_id = guest.work.work_id
        if self._assumed is not None and guest.generated:
            self._name_blocks(guest)
            self._assumed.use(guest.keys)
        self._leave_line(work_id)
        del self._works[work_id]
        if self._step is not None:
            self._step.pieces.pop(work_id, None)
            self._step.decodes_alone = False
        if not self._works:
            self._last_step_s = None  # what comes next does not follow it

    def _announce(self) -> None:
        stored, removed = self._names.take_changes()
        if stored or removed:
            self._tell(BlocksChanged(sequence=self._sequence, stored=stored, removed=removed))
            self._sequence += 1

    def _tell(self, report: Report) -> None:
        self._actions.append(Tell(report))

    def _count(self, name: str, amount: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + amount
