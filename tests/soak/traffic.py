"""Makes the requests of a soak.

Conversations grow, move between instances, are streamed, aborted and dropped. Every answer is
compared with the correct one, and every attempt must end.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field

from moonpool.protocol.block_layout import block_keys, root_key
from moonpool.protocol.messages import (
    Abort,
    AttemptFailed,
    AttemptId,
    AttemptSpec,
    DecodeAccepted,
    PrefillDone,
    PrefillStarted,
    PrefixSource,
    ReserveDecode,
    StartDecode,
    StartPrefill,
    StepTokens,
    StopReceiving,
    StreamBroken,
    TransferDone,
)
from moonpool.types import BlockKey, SamplingParams, Slo
from tests.soak.cluster import Cluster, Member, SoakError
from tests.soak.content import LAYOUT, VOCABULARY, answer
from tests.soak.orders import Up

NUM_SESSIONS = 40
MAX_SESSION_BLOCKS = 44
TIMEOUT_S = 30.0
HANG_S = 120.0
"""A request that has not ended after this time hangs."""
ABORT_RATE = 0.04
STREAM_RATE = 0.35
RELAY_RATE = 0.5
_SLO = Slo(ttft_s=float("inf"), tbt_s=float("inf"))


@dataclass(eq=False)
class Attempt:
    work: AttemptSpec
    prefill: Member
    decode: Member
    expected: list[int]
    session: Session | None
    began_s: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)
    started: PrefillStarted | None = None
    handed_over: bool = False
    outcome: str = ""  # set at the end: "done", "failed", "lost" or "aborted"

    @property
    def streams(self) -> bool:
        return self.prefill is not self.decode


@dataclass(eq=False)
class Session:
    tenant: str
    tokens: list[int]
    busy: bool = False


class Traffic:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.attempts: dict[AttemptId, Attempt] = {}
        self.prompts: dict[BlockKey, tuple[tuple[int, ...], str]] = {}
        self.cluster: Cluster | None = None
        self._num_attempts = 0
        self._openings = [self.draw_tokens(self.rng.randint(16, 120)) for _ in range(6)]
        self._sessions = [self._new_session() for _ in range(NUM_SESSIONS)]

    def draw_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def begin_any(self) -> None:
        """Starts the next turn of a random conversation at a random instance."""
        assert self.cluster is not None
        up = self.cluster.up
        idle = [i for i, session in enumerate(self._sessions) if not session.busy]
        if not up or not idle:
            return
        place = self.rng.choice(idle)
        session = self._sessions[place]
        prompt = session.tokens + self.draw_tokens(self.rng.randint(4, 90))
        if len(prompt) > MAX_SESSION_BLOCKS * LAYOUT.block_tokens:
            session = self._sessions[place] = self._new_session()
            prompt = list(session.tokens)
        prefill = self.rng.choice(up)
        others = [member for member in up if member is not prefill]
        streams = bool(others) and self.rng.random() < STREAM_RATE
        decode = self.rng.choice(others) if streams else prefill
        source = self._source(prompt, session.tenant, prefill)
        session.busy = True
        self.begin(
            prompt, session.tenant, prefill, decode, source, self.rng.randint(1, 10), session
        )

    def begin(
        self,
        prompt: list[int],
        tenant: str,
        prefill: Member,
        decode: Member,
        fetch: PrefixSource | None,
        num_tokens: int,
        session: Session | None = None,
    ) -> Attempt:
        assert self.cluster is not None
        self._num_attempts += 1
        work = AttemptSpec(
            attempt_id=AttemptId(f"w{self._num_attempts}"),
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
            slo=_SLO,
            tenant=tenant,
            use_cache=True,
            timeout_s=TIMEOUT_S,
        )
        expected = answer(prompt, tenant, num_tokens)
        attempt = Attempt(work, prefill, decode, expected, session)
        self.attempts[work.attempt_id] = attempt
        self._note_prompt(tuple(prompt), tenant)
        if attempt.streams:
            self.cluster.send(decode, ReserveDecode(attempt=work))
        target = decode.way(self.rng.random() < RELAY_RATE) if attempt.streams else None
        self.cluster.send(prefill, StartPrefill(attempt=work, fetch=fetch, target=target))
        self.seen["attempts"] += 1
        self.seen["streams"] += attempt.streams
        self.seen["fetches"] += fetch is not None
        return attempt

    def run(self, attempt: Attempt) -> Attempt:
        """Runs one attempt to its end."""
        assert self.cluster is not None
        self.cluster.wait(lambda: bool(attempt.outcome), HANG_S, f"{attempt.work.attempt_id}")
        return attempt

    def drain(self) -> None:
        """Waits until all attempts have ended."""
        assert self.cluster is not None
        self.cluster.wait(lambda: not self.attempts, HANG_S, "every attempt to end")

    def tick(self) -> None:
        """Aborts a random attempt now and then, and detects attempts that hang."""
        now_s = time.monotonic()
        for attempt in list(self.attempts.values()):
            if now_s - attempt.began_s > HANG_S:
                raise SoakError(
                    f"{attempt.work.attempt_id} (prefill {attempt.prefill.name}, decode"
                    f" {attempt.decode.name}) has not ended for {HANG_S:.0f} s"
                )
        if self.attempts and self.rng.random() < ABORT_RATE:
            self._give_up(self.rng.choice(list(self.attempts.values())), "aborted")

    # Messages of instances:

    def on_death(self, member: Member) -> None:
        for attempt in list(self.attempts.values()):
            if member is attempt.decode or (member is attempt.prefill and not attempt.handed_over):
                self._give_up(attempt, "lost")
            elif member is attempt.prefill and self.cluster is not None:
                stop = StopReceiving(attempt_id=attempt.work.attempt_id)
                self.cluster.send(attempt.decode, stop)

    def on_message(self, member: Member, message: Up) -> None:
        if isinstance(message, StepTokens):
            for told in message.attempts:
                attempt = self.attempts.get(told.attempt_id)
                if attempt is not None:
                    attempt.tokens += [token.token_id for token in told.tokens]
                    if told.finish is not None:
                        self._finish(attempt)
            return
        attempt = self.attempts.get(getattr(message, "attempt_id", AttemptId("")))
        if attempt is None:
            return
        match message:
            case PrefillStarted():
                attempt.started = message
            case PrefillDone():
                self._on_prefill_done(attempt, message)
            case StreamBroken():
                self.seen["broken streams"] += 1
                assert self.cluster is not None
                self.cluster.send(attempt.decode, StopReceiving(attempt_id=message.attempt_id))
            case TransferDone():
                self.seen["corrupt slices in streams"] += message.corrupt_slices
                if message.error and self.cluster is not None:
                    stop = StopReceiving(attempt_id=message.attempt_id)
                    self.cluster.send(attempt.decode, stop)
            case AttemptFailed():
                if message.reason == "engine_error":
                    raise SoakError(f"{member.name}: {message.message}")
                self.seen[f"refused {message.reason}"] += 1
                self._give_up(attempt, "failed")
            case DecodeAccepted():
                pass

    def _on_prefill_done(self, attempt: Attempt, message: PrefillDone) -> None:
        assert self.cluster is not None
        attempt.tokens.append(message.token.token_id)
        attempt.handed_over = True
        if message.finish is not None:
            self.cluster.send(attempt.decode, Abort(attempt_id=message.attempt_id))
            self._finish(attempt)
        else:
            start = StartDecode(attempt_id=message.attempt_id, token=message.token)
            self.cluster.send(attempt.decode, start)

    def _finish(self, attempt: Attempt) -> None:
        if attempt.tokens != attempt.expected:
            raise SoakError(
                f"{attempt.work.attempt_id} (prefill {attempt.prefill.name}, decode"
                f" {attempt.decode.name}) was answered {attempt.tokens}, not {attempt.expected}"
            )
        self.seen["answers"] += 1
        if attempt.session is not None:
            attempt.session.tokens = list(attempt.work.token_ids) + attempt.tokens
        self._end(attempt, "done")

    def _give_up(self, attempt: Attempt, outcome: str) -> None:
        assert self.cluster is not None
        for member in {attempt.prefill, attempt.decode}:
            self.cluster.send(member, Abort(attempt_id=attempt.work.attempt_id))
        self.seen[outcome] += 1
        self._end(attempt, outcome)

    def _end(self, attempt: Attempt, outcome: str) -> None:
        attempt.outcome = outcome
        if attempt.session is not None:
            attempt.session.busy = False
        del self.attempts[attempt.work.attempt_id]

    # Requests:

    def _new_session(self) -> Session:
        opening = self.rng.choice(self._openings)
        tenant = self.rng.choice(("", "", "other"))
        return Session(tenant, opening + self.draw_tokens(self.rng.randint(4, 60)))

    def _source(self, prompt: list[int], tenant: str, reader: Member) -> PrefixSource | None:
        """Returns a peer that holds a longer prefix than the reader; sometimes a peer that does
        not."""
        assert self.cluster is not None
        others = [member for member in self.cluster.up if member is not reader]
        if not others or self.rng.random() < 0.2:
            return None
        keys = block_keys(prompt, LAYOUT.block_tokens, root_key(LAYOUT.fingerprint, tenant))
        best = max(others, key=lambda member: member.reach(keys))
        num_blocks = best.reach(keys)
        if self.rng.random() < 0.03:
            num_blocks = len(keys)
        if num_blocks <= reader.reach(keys):
            return None
        return PrefixSource(source=best.way(self.rng.random() < RELAY_RATE), num_blocks=num_blocks)

    def _note_prompt(self, prompt: tuple[int, ...], tenant: str) -> None:
        keys = block_keys(prompt, LAYOUT.block_tokens, root_key(LAYOUT.fingerprint, tenant))
        for key in keys:
            self.prompts.setdefault(key, (prompt, tenant))
