"""Draws a workload from a profile: sessions of several turns, shared prompts, tool calls, bursts.

Rows come in order of time, and memory holds the live sessions only. Ids are numbered in order of
first appearance and chained as in a real trace: equal ids mean equal whole prefixes, the last one
of a prompt is usually partial. Same profile, same seed: same rows, on any machine.

Life of a session: it starts (Poisson), each turn is a row, then it waits, asks again or ends.
Sessions start before the trace does, so that the trace begins in full swing; their earlier turns
are not rows.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

from moonpool.trace.draws import BurstClock, Prompts, sampler
from moonpool.trace.profile import (
    CLASS_TOKENS,
    NUM_CLASSES,
    GeneratorProfile,
    check_profile,
    length_class,
    share_below,
)
from moonpool.trace.row import TraceError, TraceRow

BLOCK_TOKENS = 512
"""Blocks of generated traces are those of Mooncake's."""
_WARM_UP_S = 3600.0


def generate(
    profile: GeneratorProfile,
    *,
    num_requests: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    rate_rps: float | None = None,
) -> Iterator[TraceRow]:
    """Rows until either limit is reached; `rate_rps` replaces the profile's. Raises TraceError."""
    check_profile(profile)
    if num_requests is None and duration_s is None:
        raise TraceError("a generated trace needs a number of requests or a duration")
    if rate_rps is not None and not 0 < rate_rps < float("inf"):
        raise TraceError(f"rate {rate_rps} is no positive number")
    rate = (rate_rps or profile.rate_rps) / expected_turns(profile)
    return _rows(_Sessions(profile, rate, random.Random(seed)), num_requests, duration_s)


def expected_turns(profile: GeneratorProfile) -> float:
    """Mean number of turns of a session, its prompts' greatest length aside."""
    tool_share = profile.tools.share if profile.tools else 0.0
    shares = [tool_share + (1 - tool_share) * share for share in profile.continue_share]
    if shares[-1] >= 1:
        raise TraceError("sessions never end: the last of continue_share must be below 1")
    later = 1 / (1 - shares[-1])
    for share in reversed(shares[:-1]):
        later = 1 + share * later
    below = [*(share_below(profile.first_tokens, bound) for bound in CLASS_TOKENS), 1.0]
    of_class = [high - low for low, high in zip([0.0, *below[:-1]], below, strict=True)]
    followed = sum(x * y for x, y in zip(of_class, profile.first_continue_share, strict=True))
    return 1 + (tool_share + (1 - tool_share) * followed) * later


def _rows(
    sessions: _Sessions, num_requests: int | None, duration_s: float | None
) -> Iterator[TraceRow]:
    num_rows = 0
    clock = BurstClock(sessions.profile, sessions.rng)
    while num_requests is None or num_rows < num_requests:
        even_s, session = sessions.next_turn()
        if even_s >= 0:
            arrived_s = round(clock.real_s(even_s) * 1000) / 1000
            if duration_s is not None and arrived_s > duration_s:
                return
            yield TraceRow(
                arrived_s,
                session.input_tokens,
                session.output_tokens,
                sessions.hash_ids(session) if sessions.profile.has_hashes else (),
            )
            num_rows += 1
        sessions.schedule(session, even_s)


class _Session:
    """A live session, standing at one turn.

    `ids` are those of its prompt's full blocks; None: none of its turns was a row yet. `prompt` is
    the shared prompt it begins with.
    """

    __slots__ = (
        "calls_tool",
        "hash_ids",
        "ids",
        "input_tokens",
        "output_tokens",
        "prompt",
        "repeats",
        "shared_blocks",
        "turn",
    )

    def __init__(self, prompt: int | None, shared_blocks: int, input_tokens: int) -> None:
        self.prompt = prompt
        self.shared_blocks = shared_blocks
        self.input_tokens = input_tokens
        self.output_tokens = 0
        self.turn = 1
        self.calls_tool = False
        self.repeats = False
        self.ids: list[int] | None = None
        self.hash_ids: tuple[int, ...] = ()  # of its last row

    @property
    def length_class(self) -> int:
        return length_class(self.input_tokens - self.shared_blocks * BLOCK_TOKENS)


class _Sessions:
    """All live sessions, in even time: time in which the mean rate is constant."""

    def __init__(self, profile: GeneratorProfile, rate_per_s: float, rng: random.Random) -> None:
        self.profile = profile
        self.rng = rng
        self._rate_per_s = rate_per_s
        self._first = sampler(profile.first_tokens, rng)
        self._output = sampler(profile.output_tokens, rng)
        self._gap = sampler(profile.gap_s, rng)
        self._message = sampler(profile.message_tokens, rng)
        tools, branches = profile.tools, profile.branches
        self._tool_share = tools.share if tools else 0.0
        self._tool_gap = sampler(tools.gap_s if tools else (0.0,), rng)
        self._tool_output = sampler(tools.output_tokens if tools else (0.0,), rng)
        self._tool_result = sampler(tools.result_tokens if tools else (0.0,), rng)
        self._branch_shares = branches.class_share if branches else (0.0,) * NUM_CLASSES
        self._kept = sampler(branches.kept_share if branches else (0.0,), rng)
        self._new = sampler(branches.new_share if branches else (0.0,), rng)
        shared = profile.shared
        self._prompts = Prompts(shared, BLOCK_TOKENS, rng) if shared else None
        self._waiting: list[tuple[float, int, _Session]] = []
        self._num_scheduled = 0
        self._next_id = 0
        self._next_start_s = -_WARM_UP_S + rng.expovariate(rate_per_s)

    def next_turn(self) -> tuple[float, _Session]:
        if self._waiting and self._waiting[0][0] < self._next_start_s:
            even_s, _, session = heapq.heappop(self._waiting)
            return even_s, session
        even_s = self._next_start_s
        self._next_start_s += self.rng.expovariate(self._rate_per_s)
        return even_s, self._start()

    def _start(self) -> _Session:
        prompt = self._prompts.draw() if self._prompts else None
        shared_blocks = 0
        if self._prompts and prompt is not None:
            shared_blocks = self._prompts.num_blocks[prompt]
        tokens = shared_blocks * BLOCK_TOKENS + max(1, int(self._first()))
        session = _Session(prompt, shared_blocks, min(self.profile.max_input_tokens, tokens))
        self._answer(session)
        return session

    def _answer(self, session: _Session) -> None:
        session.calls_tool = self._tool_share > 0 and self.rng.random() < self._tool_share
        draw = self._tool_output if session.calls_tool else self._output
        session.output_tokens = max(1, int(draw()))

    def hash_ids(self, session: _Session) -> tuple[int, ...]:
        """Ids of the session's prompt; new blocks get new ones (mutates)."""
        if session.repeats and session.hash_ids:
            return session.hash_ids
        if session.ids is None:
            session.ids = []
            if self._prompts and session.prompt is not None:
                session.ids, self._next_id = self._prompts.ids(session.prompt, self._next_id)
        num_full, rest = divmod(session.input_tokens, BLOCK_TOKENS)
        ids = session.ids
        del ids[num_full:]
        end = self._next_id + num_full - len(ids)
        ids.extend(range(self._next_id, end))
        self._next_id = end + (rest > 0)
        session.hash_ids = (*ids, end) if rest else tuple(ids)
        return session.hash_ids

    def schedule(self, session: _Session, now_s: float) -> None:
        """The session's next turn, if it has one (mutates it)."""
        if session.turn == 1:
            share = self.profile.first_continue_share[session.length_class]
        else:
            shares = self.profile.continue_share
            share = shares[min(session.turn - 1, len(shares)) - 1]
        session.repeats = False
        if session.calls_tool:
            gap_s = self._tool_gap()
            tokens = session.input_tokens + session.output_tokens + int(self._tool_result())
        elif self.rng.random() < share:
            gap_s = self._gap()
            tokens = self._follow_up(session)
        else:
            return
        if tokens > self.profile.max_input_tokens:
            return
        session.input_tokens = tokens
        session.turn += 1
        self._answer(session)
        heapq.heappush(self._waiting, (now_s + gap_s, self._num_scheduled, session))
        self._num_scheduled += 1

    def _follow_up(self, session: _Session) -> int:
        """Length of the next prompt; cuts the ids to what it keeps (mutates)."""
        choice = self.rng.random()
        num_full = session.input_tokens // BLOCK_TOKENS
        if choice < self.profile.repeat_share:
            session.repeats = True
            return session.input_tokens
        choice -= self.profile.repeat_share
        if (
            choice < self._branch_shares[session.length_class]
            and num_full > session.shared_blocks + 1
        ):
            kept = max(session.shared_blocks + 1, round(self._kept() * num_full))
            kept = min(kept, num_full)
            if session.ids is not None:
                del session.ids[kept:]
            cut = session.input_tokens - kept * BLOCK_TOKENS
            return kept * BLOCK_TOKENS + max(1, int(self._new() * cut))
        return session.input_tokens + session.output_tokens + max(1, int(self._message()))
