"""What the Conductor remembers: the instances, and the requests under way. Soft state, all of
it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from moonpool.conductor.placement import InstanceView
from moonpool.metrics import RequestRecord
from moonpool.types import BlockKey, InstanceId, Request, Token
from moonpool.workers.messages import InstanceInfo, InstanceLoad, WorkId


class Stage(Enum):
    """How far an attempt is."""

    PREFILL = "prefill"
    HANDOVER = "handover"  # first token drawn; decode has not yet accepted
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Attempt:
    """One placement of a request, as booked."""

    work_id: WorkId
    prefill: InstanceId
    decode: InstanceId | None
    fetch_from: InstanceId | None
    prefill_s: float
    booked_tokens: int
    stage: Stage = Stage.PREFILL
    started_s: float | None = None
    first_token: Token | None = None

    @property
    def decoder(self) -> InstanceId:
        """The instance that gives the tokens."""
        return self.decode if self.decode is not None else self.prefill

    @property
    def instances(self) -> set[InstanceId]:
        return {self.prefill, self.decoder}


@dataclass(slots=True, eq=False)
class Tracked:
    """A request under way. `generated` were delivered already: a new attempt goes on after them."""

    request: Request
    keys: list[BlockKey]
    record: RequestRecord
    attempt: Attempt | None = None
    num_attempts: int = 0
    generated: list[int] = field(default_factory=list)
    explanation: list[str] = field(default_factory=list)
    failed_on: set[InstanceId] = field(default_factory=set)  # other instances come first


@dataclass(slots=True, eq=False)
class InstanceState:
    """An instance and what is booked on it."""

    info: InstanceInfo
    prefills: dict[WorkId, Attempt] = field(default_factory=dict)
    decodes: dict[WorkId, Tracked] = field(default_factory=dict)
    num_fetches_served: int = 0
    expected: dict[BlockKey, int] = field(default_factory=dict)
    last_placed_s: float = float("-inf")
    load: InstanceLoad | None = None
    resyncing: bool = False  # all its blocks were asked for

    def queue_s(self, now: float) -> float:
        """Estimated time until a new prefill starts: what is booked, less what has run already."""
        total_s = 0.0
        for attempt in self.prefills.values():
            elapsed_s = 0.0 if attempt.started_s is None else now - attempt.started_s
            total_s += max(attempt.prefill_s - elapsed_s, 0.0)
        return total_s

    def expect(self, keys: list[BlockKey], amount: int) -> None:
        """Counts blocks that are being computed here (mutates): to a later request they are hits,
        because this instance serves in order."""
        for key in keys:
            left = self.expected.get(key, 0) + amount
            if left > 0:
                self.expected[key] = left
            else:
                self.expected.pop(key, None)

    def num_expected(self, keys: list[BlockKey], num_held: int) -> int:
        """Blocks of the prefix held now (`num_held` of them) or expected after those."""
        depth = num_held
        while depth < len(keys) and keys[depth] in self.expected:
            depth += 1
        return depth

    def view(
        self, keys: list[BlockKey], num_held: int, num_tokens: int, now: float
    ) -> InstanceView:
        """A snapshot for placing one request."""
        layout = self.info.layout
        usable = (num_tokens - 1) // layout.block_tokens
        hit = min(self.num_expected(keys, num_held), usable)
        context_tokens, booked_tokens, next_exit_s = self._decode_load()
        return InstanceView(
            instance_id=self.info.instance_id,
            role=self.info.role,
            cost=self.info.cost,
            host_id=self.info.address.host_id,
            hit_tokens=hit * layout.block_tokens,
            source_tokens=min(num_held, usable) * layout.block_tokens,
            queue_s=self.queue_s(now),
            num_fetches_served=self.num_fetches_served,
            decode_batch=len(self.decodes),
            decode_context_tokens=context_tokens,
            room_tokens=self.info.num_blocks * layout.block_tokens - booked_tokens,
            next_exit_s=next_exit_s,
            last_placed_s=self.last_placed_s,
        )

    def _decode_load(self) -> tuple[int, int, float]:
        """Tokens of all contexts, tokens of KVCache booked, and the time until the decode with the
        fewest tokens left ends if its answer is as long as booked. In one pass, because it runs
        over everything in flight for each request that arrives."""
        context_tokens = booked_tokens = 0
        fewest_left = 0
        for tracked in self.decodes.values():
            assert tracked.attempt is not None
            num_tokens = len(tracked.request.token_ids) + len(tracked.generated)
            context_tokens += num_tokens
            # An answer may turn out longer than was booked for it.
            booked = max(tracked.attempt.booked_tokens, num_tokens + 1)
            booked_tokens += booked
            left = booked - num_tokens
            fewest_left = min(fewest_left, left) if fewest_left else left
        if not fewest_left:
            return 0, 0, 0.0
        step_s = self.info.cost.decode_step_s(len(self.decodes), context_tokens)
        return context_tokens, booked_tokens, fewest_left * step_s
