"""The events that an instance's state machine handles and the actions that it returns.

Commands of the head and events of the messenger come from `protocol`; the engine's events are
defined here. The live worker process and the simulator both perform these actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from moonpool.protocol.messages import AttemptId, Command, Report
from moonpool.protocol.transfer_events import MessengerEvent, PeerAddress
from moonpool.types import BlockId, BlockKey, Pooling, SamplingParams, Token, TokenLogprobs


class Arriving(msgspec.Struct, frozen=True):
    """Transfers in progress that fill blocks which a step reads: a fetch (its id, or "" for none)
    and loads from the SSD. Before the attention of a layer, the engine waits until every transfer
    has delivered that layer. The waits of a step together last at most `timeout_s`."""

    fetch_id: str
    timeout_s: float
    load_ids: tuple[str, ...] = ()


class DraftTask(NamedTuple):
    """What the draft model does for an entry before its step: it computes `token_ids`, which begin
    at position `start`, into its own blocks, and then guesses the next tokens greedily.

    The draft model guesses `num_drafts` tokens, or fewer if it reaches one of `end_token_ids`. The
    driver makes the guessed tokens the entry's drafts.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    num_drafts: int
    end_token_ids: frozenset[int] = frozenset()


class StepEntry(NamedTuple):
    """One request's share of a step, as the engine needs it.

    The `new_token_ids` begin at position `start` of the request's text. `draw` is None if a later
    step computes the newest token, so that this one draws none. `generated` are the answer's tokens
    so far, if there is a draw.

    `sends` lists blocks as (index in the request's block table, block). Their slices of a layer are
    complete once this step has computed that layer; the driver streams them while later layers run.

    `arriving` is set while blocks before `start` are still arriving. If one of their layers does
    not arrive or fails its checksum, the entry is `missed`: no later layer of it is streamed.
    """

    attempt_id: AttemptId
    new_token_ids: Sequence[int]
    start: int
    block_ids: Sequence[BlockId]
    draw: SamplingParams | None
    generated: Sequence[int] = ()
    sends: tuple[tuple[int, BlockId], ...] = ()
    arriving: Arriving | None = None
    prompt_ids: frozenset[int] = frozenset()
    """The distinct tokens of the prompt, if the draw needs them; otherwise empty."""
    targets: Sequence[int] = ()
    """The tokens of the prompt after each of the first new tokens, if their logprobs are wanted."""
    num_logprobs: int = 0
    """The number of most likely tokens that are listed beside each target."""
    adapter: str = ""
    """The fingerprint of the request's LoRA adapter; "" means none."""
    pooling: Pooling = "none"
    """What this step adds to the prompt's embedding; the entry with a `draw` completes it."""
    pooled: bytes = b""
    """The sum of the hidden states of the earlier steps, as the engine returned it."""
    num_drafts: int = 0
    """How many of the new tokens, from the end, are guesses. A token is drawn from the row before
    each."""
    any_content: bool = False
    """The content of the blocks before `start` does not matter: the step is a measurement."""
    draft_task: DraftTask | None = None
    """The draft model's work for this entry; its guesses follow the new tokens."""

    @property
    def drafts(self) -> Sequence[int]:
        """Returns the guessed tokens, which are the last of the new ones."""
        return self.new_token_ids[len(self.new_token_ids) - self.num_drafts :]

    def with_drafts(self, token_ids: Sequence[int]) -> StepEntry:
        """Returns the entry after its draft model has guessed `token_ids`."""
        new_token_ids = (*self.new_token_ids, *token_ids)
        return self._replace(
            new_token_ids=new_token_ids, num_drafts=len(token_ids), draft_task=None
        )


class RunStep(msgspec.Struct, frozen=True):
    """Run one step of the engine. The driver answers with `StepEnded` or `StepFailed`.

    Up to `InstanceConfig.max_steps_in_flight` steps are in progress at a time; they end in the
    order in which they began. A step that contains only decodes may be repeated, each token feeding
    the next, until it has run `max_repeats` times or one of its answers ends. The driver then sends
    one `StepsEnded`, so that it handles one event for many tokens.
    """

    entries: tuple[StepEntry, ...]
    max_repeats: int = 1
    drafting_s: float = 0.0  # predicted time that the draft model works before the step


class StopRepeating(msgspec.Struct, frozen=True):
    """End the repeated step after the current repetition, because the batch has changed."""


class StepEnded(msgspec.Struct, frozen=True):
    """A step has ended; `tokens[i]` belongs to `entries[i]`, and is None if that entry has no
    `draw`. `missed`: the indices of the entries whose prefix did not arrive, so that their results
    are void. For all other entries, the ends of the transfers in `arriving` are posted before this
    event."""

    tokens: Sequence[Token | None]
    seconds: float
    missed: tuple[int, ...] = ()
    scored: Mapping[int, Sequence[TokenLogprobs]] = msgspec.field(default_factory=dict)
    """Entry -> the logprobs of its `targets`."""
    pooled: Mapping[int, bytes] = msgspec.field(default_factory=dict)
    """Entry -> what its next step needs as `StepEntry.pooled`."""
    further: Mapping[int, Sequence[Token]] = msgspec.field(default_factory=dict)
    """Entry -> the tokens after its first, one for each of its drafts that was right."""
    drafted: Mapping[int, Sequence[int]] = msgspec.field(default_factory=dict)
    """Entry -> the tokens that its draft model guessed. An entry with a `draft_task` that is
    missing here had no drafts: the draft model failed."""


class StepsEnded(msgspec.Struct, frozen=True):
    """A repeated step has ended; `tokens[i]` holds one token of `entries[i]` per repetition."""

    tokens: Sequence[Sequence[Token]]
    seconds: float  # time of all repetitions together


class StepFailed(msgspec.Struct, frozen=True):
    """A step has failed. If `lost_arena` is set, it failed because that arena is gone; requests
    without blocks in it can continue."""

    message: str
    lost_arena: int | None = None


class ArenaLost(msgspec.Struct, frozen=True):
    """One of the instance's arenas is gone, with all of its content. Transfers that use its blocks
    still end, each with its own event."""

    arena: int
    message: str


class ArenaBack(msgspec.Struct, frozen=True):
    """The arena can be used again; `named` lists the blocks that have kept their content."""

    arena: int
    named: tuple[tuple[BlockId, BlockKey], ...] = ()


class FetchBlocks(msgspec.Struct, frozen=True):
    """Copy blocks from a peer, in this order; answered with `FetchEnded`."""

    fetch_id: str
    source: PeerAddress
    keys: Sequence[BlockKey]
    block_ids: Sequence[BlockId]
    timeout_s: float


class GrantRead(msgspec.Struct, frozen=True):
    """Let a peer read these blocks; answered with `ReadEnded`."""

    read_id: str
    block_ids: Sequence[BlockId]


class StartStream(msgspec.Struct, frozen=True):
    """Open a stream of KVCache to `target`; answered with `SendEnded`."""

    stream_id: str
    target: PeerAddress
    timeout_s: float


class SendBlocks(msgspec.Struct, frozen=True):
    """Send all layers of a cached prefix, whose blocks were complete before the prefill began."""

    stream_id: str
    blocks: tuple[tuple[int, BlockId], ...]


class FinishStream(msgspec.Struct, frozen=True):
    """End the stream once everything sent so far has arrived."""

    stream_id: str


class AbortStream(msgspec.Struct, frozen=True):
    """End the stream at once; `SendEnded` still follows."""

    stream_id: str


class ExpectStream(msgspec.Struct, frozen=True):
    """Receive a stream into blocks, the first of which has index `first_index`.

    Answered with `ReceiveEnded`.
    """

    stream_id: str
    block_ids: Sequence[BlockId]
    first_index: int
    timeout_s: float


class CancelStream(msgspec.Struct, frozen=True):
    """Stop receiving the stream; `ReceiveEnded` still follows."""

    stream_id: str


class StoreBlocks(msgspec.Struct, frozen=True):
    """Write blocks to slots of the SSD, in this order; answered with `StoreEnded`. Until then the
    blocks are held and only read. The previous content of the slots is already void."""

    store_id: str
    keys: tuple[BlockKey, ...]
    block_ids: tuple[BlockId, ...]
    slots: tuple[int, ...]


class LoadBlocks(msgspec.Struct, frozen=True):
    """Read slots of the SSD into blocks, in this order; answered with `LoadEnded`. Until then
    nothing else uses the blocks, and the slots keep their content. With `by_layer`, a prefill may
    compute at the same time: the reader delivers layer after layer of all blocks and reports its
    progress with `LoadProgress`."""

    load_id: str
    keys: tuple[BlockKey, ...]
    slots: tuple[int, ...]
    block_ids: tuple[BlockId, ...]
    by_layer: bool = False


class LookUpBlocks(msgspec.Struct, frozen=True):
    """Find the longest run of `keys` in a shared store; answered with `LookUpEnded`. A prefill
    waits for the answer."""

    lookup_id: str
    keys: tuple[BlockKey, ...]


class ForgetStored(msgspec.Struct, frozen=True):
    """Drop the content of these slots: the blocks were evicted, corrupt or incompletely written.
    Not answered."""

    slots: tuple[int, ...]


class SendReport(NamedTuple):
    """Send a report to the head."""

    report: Report


class ExitProcess(msgspec.Struct, frozen=True):
    """End the process in good order."""


WorkerEvent = Command | MessengerEvent | StepEnded | StepsEnded | StepFailed | ArenaLost | ArenaBack

WorkerAction = (
    RunStep
    | StopRepeating
    | FetchBlocks
    | GrantRead
    | StartStream
    | SendBlocks
    | FinishStream
    | AbortStream
    | ExpectStream
    | CancelStream
    | StoreBlocks
    | LoadBlocks
    | LookUpBlocks
    | ForgetStored
    | ExitProcess
    | SendReport
)


class ActionBuffer:
    """The actions and counters of one instance. Handling an event fills the list of actions; the
    instance takes and returns them when it is done."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self._actions: list[WorkerAction] = []

    def perform(self, action: WorkerAction) -> None:
        """Adds an action; the driver performs actions in the order of these calls."""
        self._actions.append(action)

    def report(self, report: Report) -> None:
        """Adds a report to the head."""
        self._actions.append(SendReport(report))

    def count(self, name: str, amount: float = 1) -> None:
        """Adds `amount` to a counter; 0 does not create it."""
        if amount:
            self.counters[name] = self.counters.get(name, 0.0) + amount

    def take(self) -> list[WorkerAction]:
        """Returns the actions added since the last call."""
        actions, self._actions = self._actions, []
        return actions
