"""Generates a workload from a profile: sessions with turns, shared prompts, tool calls and bursts.

Rows are in order of time, and memory holds active sessions only. Block ids are numbered by first
appearance. As in a recorded trace, equal ids mean equal whole prefixes, and the last block of a
prompt is usually partial. The same profile and seed give the same rows on any machine.

Life of a session: it starts (a Poisson process), each turn is a row, and after a gap it has another
turn or ends. Sessions start an hour before the trace, so that the trace starts in steady state;
turns before the start of the trace are not rows.

A mix generates several profiles together, each with its own rate by the hour of a day.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from itertools import islice

import msgspec

from moonpool.trace.draws import BurstClock, DayClock, SharedPromptPool, sampler
from moonpool.trace.profile import (
    CLASS_TOKENS,
    NUM_CLASSES,
    GeneratorProfile,
    Mix,
    MixComponent,
    check_profile,
    length_class,
    share_below,
)
from moonpool.trace.row import TraceError, TraceRow

BLOCK_TOKENS = 512
"""Block size of generated traces, as in Mooncake's."""
_WARM_UP_S = 3600.0


def generate(
    profile: GeneratorProfile,
    *,
    num_requests: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    rate_rps: float | None = None,
    closed_loop: bool = False,
) -> Iterator[TraceRow]:
    """Yields rows until either limit is reached. `rate_rps` replaces the rate of the workload's
    profile.

    `closed_loop`: whether sessions are programs, in which each turn waits for the previous one, and
    a gap begins at the end of the previous turn. Only sessions that begin within the trace have
    rows in it. Raises TraceError.
    """
    check_profile(profile)
    _check_limits(num_requests, duration_s, rate_rps)
    rate = (rate_rps or profile.rate_rps) / expected_turns(profile)
    sessions = _Sessions(profile, rate, random.Random(seed))
    if closed_loop:
        return _programs(sessions, num_requests, duration_s)
    return _rows(sessions, num_requests, duration_s)


def _check_limits(
    num_requests: int | None, duration_s: float | None, rate_rps: float | None
) -> None:
    if num_requests is None and duration_s is None:
        raise TraceError("a generated trace needs a number of requests or a duration; give one")
    if rate_rps is not None and not 0 < rate_rps < float("inf"):
        raise TraceError(f"rate {rate_rps} is not a positive number; use for example 2.5")


def expected_turns(profile: GeneratorProfile) -> float:
    """The mean number of turns of a session, without regard to the largest prompt.

    Raises TraceError for sessions that never end.
    """
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


def _programs(
    sessions: _Sessions, num_requests: int | None, duration_s: float | None
) -> Iterator[TraceRow]:
    """Yields the rows of whole programs, program by program, in the order in which they begin."""
    num_rows = 0
    clock = BurstClock(sessions.profile, sessions.rng)
    while num_requests is None or num_rows < num_requests:
        even_s, session = sessions.next_start()
        if even_s < 0:
            continue
        arrived_s = round(clock.real_s(even_s) * 1000) / 1000
        if duration_s is not None and arrived_s > duration_s:
            return
        name, before = f"program-{sessions.num_started}", ""
        delay_s: float | None = 0.0
        while delay_s is not None:
            call = f"{name}#{session.turn}"
            yield TraceRow(
                arrived_s,
                session.input_tokens,
                session.output_tokens,
                sessions.hash_ids(session) if sessions.profile.has_hashes else (),
                name,
                call=call,
                after=(before,) if before else (),
                delay_s=round(delay_s, 3),
                tool="tool" if session.calls_tool else "",
            )
            num_rows += 1
            before = call
            if num_rows == num_requests:
                return
            delay_s = sessions.go_on(session)


class _Session:
    """An active session at one of its turns.

    `ids` are the ids of its prompt's full blocks, or None before its first row. `prompt` is the
    number of the shared prompt with which it starts.
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
        self.hash_ids: tuple[int, ...] = ()  # block ids of the session's last row

    @property
    def length_class(self) -> int:
        return length_class(self.input_tokens - self.shared_blocks * BLOCK_TOKENS)


class _Sessions:
    """All active sessions, in even time, in which the mean arrival rate is constant."""

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
        self._prompts = SharedPromptPool(shared, BLOCK_TOKENS, rng) if shared else None
        self._waiting: list[tuple[float, int, _Session]] = []
        self._num_scheduled = 0
        self.num_started = 0
        self._next_id = 0
        self._next_start_s = -_WARM_UP_S + rng.expovariate(rate_per_s)

    def next_turn(self) -> tuple[float, _Session]:
        """Returns the next turn in even time: of a waiting session, or of a new one."""
        if self._waiting and self._waiting[0][0] < self._next_start_s:
            even_s, _, session = heapq.heappop(self._waiting)
            return even_s, session
        return self.next_start()

    def next_start(self) -> tuple[float, _Session]:
        """A new session, and when it starts in even time."""
        even_s = self._next_start_s
        self.num_started += 1
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
        """The ids of the session's prompt. New blocks get new ids."""
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
        """Schedules the next turn of the session, if it has one."""
        gap_s = self.go_on(session)
        if gap_s is not None:
            heapq.heappush(self._waiting, (now_s + gap_s, self._num_scheduled, session))
            self._num_scheduled += 1

    def go_on(self, session: _Session) -> float | None:
        """Moves the session to its next turn; returns the gap before it, None if it has none."""
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
            return None
        if tokens > self.profile.max_input_tokens:
            return None
        session.input_tokens = tokens
        session.turn += 1
        self._answer(session)
        return gap_s

    def _follow_up(self, session: _Session) -> int:
        """Returns the length of the next prompt. Cuts `session.ids` to the blocks that it keeps."""
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


def generate_mix(
    mix: Mix,
    *,
    num_requests: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    rate_rps: float | None = None,
) -> Iterator[TraceRow]:
    """Yields rows until either limit is reached. `rate_rps` replaces the mean rate of the day.

    Block ids of different components are never equal. Raises TraceError.
    """
    _check_limits(num_requests, duration_s, rate_rps)
    factor = 1.0 if rate_rps is None else rate_rps / mix.rate_rps
    parts = [
        _component_rows(kind, number, len(mix.kinds), mix.day_s, factor, seed)
        for number, kind in enumerate(mix.kinds)
    ]
    return _until(heapq.merge(*parts, key=lambda row: row.arrived_s), num_requests, duration_s)


def _component_rows(
    kind: MixComponent, number: int, num_kinds: int, day_s: float, factor: float, seed: int
) -> Iterator[TraceRow]:
    clock = DayClock(kind.by_hour, day_s)
    rows = generate(
        kind.profile,
        duration_s=float("inf"),
        seed=seed * num_kinds + number,
        rate_rps=kind.profile.rate_rps * factor,
    )
    for row in rows:
        yield msgspec.structs.replace(
            row,
            arrived_s=round(clock.real_s(row.arrived_s) * 1000) / 1000,
            hash_ids=tuple(one * num_kinds + number for one in row.hash_ids),
        )


def _until(
    rows: Iterator[TraceRow], num_requests: int | None, duration_s: float | None
) -> Iterator[TraceRow]:
    for row in islice(rows, num_requests):
        if duration_s is not None and row.arrived_s > duration_s:
            return
        yield row
