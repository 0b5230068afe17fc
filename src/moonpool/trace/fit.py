"""Fits the profile of a generated workload to a trace: lengths, turns, gaps, popularity, bursts.

Sessions start before a trace and continue after it, so figures of whole sessions come from its
middle. First turns are taken from late rows, which can hardly be later turns of sessions before the
trace. Follow-ups are counted for early rows, whose next turns the trace would show. Memory holds
all rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from moonpool.trace.blocks import Turn, TurnTracker
from moonpool.trace.draws import LONG_S, SHORT_S
from moonpool.trace.profile import (
    NUM_CLASSES,
    Branches,
    GeneratorProfile,
    SharedPrompts,
    ToolCalls,
    length_class,
    quantiles_of,
)
from moonpool.trace.row import TraceError, TraceRow
from moonpool.trace.statistics import dispersion

_MIN_ROWS = 100
_EDGE_SHARE = 0.3  # share of the duration that is left out at either end
_SHARED_FAN_OUT = 16  # number of different continuations that make a prefix a shared prompt
_MAX_TURN_SHARES = 6
_MIN_SAMPLES = 20
_TOOL_GAP_S = 10.0  # shorter pauses are tools, because a person does not read and write so fast
_MIN_TOOL_SHARE = 0.05


class _Row:
    """A row with its shared prompt and its turn of a session."""

    __slots__ = ("is_followed", "previous", "row", "shared_blocks", "shared_id", "turn")

    def __init__(self, row: TraceRow, shared_id: int, shared_blocks: int) -> None:
        self.row = row
        self.shared_id = shared_id
        self.shared_blocks = shared_blocks
        self.turn: Turn | None = None
        self.previous: _Row | None = None
        self.is_followed = False

    @property
    def index(self) -> int:
        return self.turn.index if self.turn else 1


def fit(rows: Iterable[TraceRow], block_tokens: int, name: str = "fitted") -> GeneratorProfile:
    """Fits a profile to rows in order of time.

    `block_tokens` is the block size of the trace, or 0 without hashes. Rows must be spread over
    ticks, which otherwise look like bursts. Raises TraceError if the rows do not suffice.
    """
    held = list(rows)
    if len(held) < _MIN_ROWS:
        raise TraceError(f"{len(held)} rows are too few to fit a profile; use at least {_MIN_ROWS}")
    duration_s = held[-1].arrived_s - held[0].arrived_s
    if duration_s <= 0:
        raise TraceError("all rows arrive at once, so there is no rate to fit; use a longer trace")
    has_hashes = block_tokens > 0 and any(row.hash_ids for row in held)
    profile = GeneratorProfile(
        name=name,
        rate_rps=round(len(held) / duration_s, 4),
        first_tokens=quantiles_of([row.input_tokens for row in held]),
        output_tokens=quantiles_of([row.output_tokens for row in held]),
        max_input_tokens=max(row.input_tokens for row in held),
        has_hashes=has_hashes,
    )
    if not has_hashes:
        return _with_bursts(profile, [row.arrived_s for row in held], {})
    linked = _link(held)
    return _with_bursts(
        _with_sessions(profile, linked, block_tokens, duration_s),
        [row.arrived_s for row in held],
        {window_s: _session_dispersion(linked, window_s) for window_s in (SHORT_S, LONG_S)},
    )


def _link(rows: Sequence[TraceRow]) -> list[_Row]:
    """Finds shared prompts, by their number of continuations, and the previous turn of each row."""
    fan_out: Counter[int] = Counter()
    seen: set[int] = set()
    for row in rows:
        parent = -1
        for block in row.hash_ids:
            if block not in seen:
                seen.add(block)
                fan_out[parent] += 1
            parent = block
    shared = {block for block, count in fan_out.items() if count >= _SHARED_FAN_OUT and block >= 0}
    trackers: dict[int, TurnTracker] = {}
    linked = []
    by_turn: dict[Turn, _Row] = {}
    for row in rows:
        depths = [depth for depth, block in enumerate(row.hash_ids, 1) if block in shared]
        depth = depths[-1] if depths else 0
        found = _Row(row, row.hash_ids[depth - 1] if depth else -1, depth)
        # There is one tracker per shared prompt, because a row may contain the shared prompt of
        # other rows.
        tracker = trackers.setdefault(found.shared_id, TurnTracker(min_blocks=depth + 1))
        found.turn, previous = tracker.add(row)
        by_turn[found.turn] = found
        if previous is not None:
            found.previous = by_turn[previous]
            found.previous.is_followed = True
        linked.append(found)
    return linked


def _with_sessions(
    profile: GeneratorProfile, linked: list[_Row], block_tokens: int, duration_s: float
) -> GeneratorProfile:
    early_s, late_s = _EDGE_SHARE * duration_s, (1 - _EDGE_SHARE) * duration_s
    firsts = [x for x in linked if x.previous is None and x.row.arrived_s >= early_s]
    middle = [x for x in linked if early_s <= x.row.arrived_s <= late_s]
    pairs = [(x.previous, x) for x in linked if x.previous is not None]
    pairs = [(before, x) for before, x in pairs if before.row.arrived_s <= late_s]
    if not firsts:
        raise TraceError("no row of the trace starts a session; use a longer trace")
    profile = msgspec.structs.replace(
        profile,
        shared=_shared(firsts, block_tokens),
        first_tokens=quantiles_of([_own_tokens(x, block_tokens) for x in firsts]),
    )
    if len(pairs) < _MIN_SAMPLES:
        return profile
    tools = [(before, x) for before, x in pairs if _gap_s(before, x) < _TOOL_GAP_S]
    if len(tools) < _MIN_TOOL_SHARE * len(pairs):
        tools = []
    callers = {id(before) for before, _ in tools}
    by_people = [(before, x) for before, x in pairs if id(before) not in callers]
    if len(by_people) < _MIN_SAMPLES:
        raise TraceError("nearly all turns follow within seconds; no session can be recognised")
    middle_without_tools = [x for x in middle if id(x) not in callers]
    answers = [x.row.output_tokens for x in linked if id(x) not in callers]
    return msgspec.structs.replace(
        _with_follow_ups(profile, by_people, block_tokens),
        output_tokens=quantiles_of(answers),
        first_continue_share=_first_continue_shares(middle_without_tools, block_tokens),
        continue_share=_continue_shares(middle_without_tools),
        gap_s=quantiles_of([_gap_s(before, x) for before, x in by_people], digits=1),
        tools=_tool_calls(tools, len(middle), len(middle) - len(middle_without_tools)),
    )


def _with_follow_ups(
    profile: GeneratorProfile, pairs: list[tuple[_Row, _Row]], block_tokens: int
) -> GeneratorProfile:
    """Shares and lengths of follow-ups that continue, repeat or cut the previous prompt."""
    num_repeats = 0
    messages: list[int] = []
    kept_shares: list[float] = []
    new_shares: list[float] = []
    of_class, cut_of_class = [0] * NUM_CLASSES, [0] * NUM_CLASSES
    for before, x in pairs:
        assert x.turn is not None
        hit_blocks = x.turn.hit_blocks
        number = length_class(_own_tokens(before, block_tokens))
        of_class[number] += 1
        num_full = before.row.input_tokens // block_tokens
        if x.row.input_tokens == before.row.input_tokens and x.row.hash_ids == before.row.hash_ids:
            num_repeats += 1
        elif hit_blocks >= num_full:
            answered = before.row.input_tokens + before.row.output_tokens
            messages.append(max(1, x.row.input_tokens - answered))
        else:
            cut_of_class[number] += 1
            kept_shares.append(hit_blocks / num_full)
            kept_tokens = hit_blocks * block_tokens
            cut_tokens = before.row.input_tokens - kept_tokens
            new_shares.append(max(0, x.row.input_tokens - kept_tokens) / cut_tokens)
    branches = None
    if len(kept_shares) >= _MIN_SAMPLES:
        branches = Branches(
            class_share=tuple(
                round(cut / max(1, of), 4) for cut, of in zip(cut_of_class, of_class, strict=True)
            ),
            kept_share=quantiles_of(kept_shares, digits=3),
            new_share=quantiles_of(new_shares, digits=3),
        )
    return msgspec.structs.replace(
        profile,
        message_tokens=quantiles_of(messages or [1]),
        repeat_share=round(num_repeats / len(pairs), 4),
        branches=branches,
    )


def _tool_calls(
    pairs: list[tuple[_Row, _Row]], num_turns: int, num_callers: int
) -> ToolCalls | None:
    if not pairs:
        return None
    results = [
        max(0, x.row.input_tokens - before.row.input_tokens - before.row.output_tokens)
        for before, x in pairs
    ]
    return ToolCalls(
        share=round(num_callers / max(1, num_turns), 4),
        gap_s=quantiles_of([_gap_s(before, x) for before, x in pairs], digits=1),
        output_tokens=quantiles_of([before.row.output_tokens for before, _ in pairs]),
        result_tokens=quantiles_of(results),
    )


def _gap_s(before: _Row, after: _Row) -> float:
    return after.row.arrived_s - before.row.arrived_s


def _own_tokens(x: _Row, block_tokens: int) -> int:
    return max(1, x.row.input_tokens - x.shared_blocks * block_tokens)


def _followed_share(rows: list[_Row]) -> float:
    return min(0.99, round(sum(x.is_followed for x in rows) / max(1, len(rows)), 4))


def _first_continue_shares(rows: list[_Row], block_tokens: int) -> tuple[float, ...]:
    """The share of first turns with a next one, by length class. Classes with too few rows get the
    share of all."""
    firsts = [x for x in rows if x.previous is None]
    shares = []
    for number in range(NUM_CLASSES):
        of_class = [x for x in firsts if length_class(_own_tokens(x, block_tokens)) == number]
        shares.append(_followed_share(of_class if len(of_class) >= _MIN_SAMPLES else firsts))
    return tuple(shares)


def _continue_shares(rows: list[_Row]) -> tuple[float, ...]:
    """The share of second, third ... turns with a next one; the last value is for all later."""
    shares: list[float] = []
    for index in range(2, _MAX_TURN_SHARES + 2):
        is_last = index == _MAX_TURN_SHARES + 1
        of_turn = [x for x in rows if (x.index >= index if is_last else x.index == index)]
        if len(of_turn) < _MIN_SAMPLES:
            break
        shares.append(_followed_share(of_turn))
    return tuple(shares) or (0.0,)


def _shared(firsts: list[_Row], block_tokens: int) -> SharedPrompts | None:
    counts = Counter(x.shared_id for x in firsts if x.shared_blocks)
    if not counts:
        return None
    return SharedPrompts(
        share=round(sum(counts.values()) / len(firsts), 4),
        count=len(counts),
        skew=_zipf_skew(list(counts.values())),
        tokens=quantiles_of([x.shared_blocks * block_tokens for x in firsts if x.shared_blocks]),
    )


def _zipf_skew(counts: list[int]) -> float:
    """The Zipf exponent with which two samples agree as often as in these counts."""
    total = sum(counts)
    same = sum(count * count for count in counts) / total**2
    low, high = 0.0, 4.0
    for _ in range(30):
        skew = (low + high) / 2
        weights = [rank**-skew for rank in range(1, len(counts) + 1)]
        if sum(w * w for w in weights) / sum(weights) ** 2 < same:
            low = skew
        else:
            high = skew
    return round(low, 3)


def _session_dispersion(linked: list[_Row], window_s: float) -> float:
    """The part of the index of dispersion caused by turns of one session in one window."""
    pairs = 0.0
    for x in linked:
        before = x.previous
        while before is not None and _gap_s(before, x) < window_s:
            pairs += 1 - _gap_s(before, x) / window_s
            before = before.previous
    return 2 * pairs / len(linked)


def _with_bursts(
    profile: GeneratorProfile, times_s: Sequence[float], of_sessions: dict[float, float]
) -> GeneratorProfile:
    """Solves for the two rate variances that give the measured dispersion at both windows."""
    seen = {}
    for window_s in (SHORT_S, LONG_S):
        found = dispersion(times_s, window_s)
        if found is None:
            return profile
        excess = found - 1 - of_sessions.get(window_s, 0.0)
        seen[window_s] = max(0.0, excess) / profile.rate_rps
    short_s, long_s = _weight(SHORT_S, SHORT_S), _weight(SHORT_S, LONG_S)
    short_l, long_l = _weight(LONG_S, SHORT_S), _weight(LONG_S, LONG_S)
    determinant = short_s * long_l - long_s * short_l
    short_cv2 = (seen[SHORT_S] * long_l - long_s * seen[LONG_S]) / determinant
    long_cv2 = (short_s * seen[LONG_S] - short_l * seen[SHORT_S]) / determinant
    if long_cv2 < 0:
        short_cv2, long_cv2 = seen[SHORT_S] / short_s, 0.0
    if short_cv2 < 0:
        short_cv2, long_cv2 = 0.0, seen[LONG_S] / long_l
    return msgspec.structs.replace(
        profile,
        burst_short_cv2=round(max(0.0, short_cv2), 4),
        burst_long_cv2=round(max(0.0, long_cv2), 4),
    )


def _weight(window_s: float, period_s: float) -> float:
    """Seconds that a window of `window_s` spends in one period of `period_s`."""
    return min(window_s, period_s)
