"""Measures a server through its API, within a given time, to make a profile for the simulator.

Prompts are timed alone, by length and by cached tokens. Answers are timed by the number of answers
that decode together. A long prompt beside answers shows how prompts and decodes share steps. At the
end, prompts fill the cache until the first prompt is no longer cached. Each part of the measurement
has a share of the time, and measures its most useful cases first. Cases that were not measured are
derived from the measured ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from statistics import fmean, median, median_low
from time import monotonic

import msgspec

from moonpool.cost.fitted import (
    DecodeSample,
    DecodeSpread,
    FittedCost,
    MixedSample,
    PrefillSample,
    fit_cost,
)
from moonpool.distributions import rank_above
from moonpool.types import Struct
from moonpool_lab.forecast.front_door import FrontDoor, Prompt, TimedAnswer
from moonpool_lab.profiling.decode_curve import with_decode_curve
from moonpool_lab.profiling.learned_decode_steps import equally_likely
from moonpool_lab.replay.server import ServerUnfitError

PREFILL_SHARE, CACHED_SHARE, DECODE_SHARE, CHUNK_SHARE = 0.25, 0.15, 0.35, 0.1
"""The shares of the measuring time for the kinds of measurement; the rest fills the cache."""
SHORTEST_PROMPT = 16
NUM_LENGTHS = 6
MOST_REPEATS = 5
CACHED_PARTS = (0.75, 0.5)
"""The cached shares of the prompts that measure hits."""
HIT_SHARE = 0.75
"""A repeated prompt counts as cached if it takes less than this share of its first time."""
BATCHES = (1, 4, 8, 2, 16, 32, 64)
STEPS = 24
HANDOVERS = 3
HANDOVER_STEPS = 8
LEAST_LENGTHS = 3
"""A middle, the longest and the shortest length. Without the shortest one, the fit would give a
prompt of one token the time of all other prompts."""
LEAST_TIMES = 6
"""The spread of single steps is taken from the times of at least this many prompts."""
LEAST_GAPS = 3
LEAST_RATIO = 0.01
"""The least time of a step over its usual time. A client may read two tokens at once, although a
step lies between them."""
MOST_ANSWER_TOKENS = 256
BESIDE = 8
"""At most this many answers run beside the long prompt that shows the size of chunks."""
KV_BYTES_PER_TOKEN = 1024
"""A nominal value without effect on a forecast, because measured times include transfers."""
INSTANT_BYTES_PER_S = 1e12
DEFAULT_CHUNK_TOKENS = 2048
MOST_DRIFT = 1.25
"""If a server's speed changes by this factor during the measurement, it is measured again."""
MOST_AGAIN = 2
UNLIMITED_SEQUENCES = 256
"""The value of `max_sequences` if no limit was met: the default of engines for many users."""


class MeasuredServer(Struct, frozen=True):
    """The results of measuring a server. `cache_tokens` is a lower limit, unless the cache was
    `full`. `max_sequences` is the most answers at a time, or UNLIMITED_SEQUENCES if no limit was
    met. `hits_said` is whether the server tells how much of a prompt it found in its cache."""

    cost: FittedCost
    prefills: tuple[PrefillSample, ...]
    decodes: tuple[DecodeSample, ...]
    chunk_tokens: int
    max_sequences: int
    has_cache: bool
    cache_tokens: int
    full: bool
    hits_said: bool
    # by how much later the first of several tokens comes than the only token of an answer
    handover_s: float
    seconds: float
    # time of each single prompt over the fitted time, scaled to the mean 1
    chunk_ratios: tuple[float, ...] = ()
    drift: float = 1.0  # time of a prompt at the end, divided by its time at the beginning

    @property
    def is_steady(self) -> bool:
        return 1 / MOST_DRIFT <= self.drift <= MOST_DRIFT


class ServerRoles(Struct, frozen=True):
    """The instances of a server whose clients see one address. `decoding` is the number of
    instances that decode, and `separate` says whether other instances prefill."""

    decoding: int = 1
    separate: bool = False


SINGLE = ServerRoles()


PromptBeside = tuple[TimedAnswer, TimedAnswer]
"""A prompt's only token, and an answer that decoded meanwhile."""


class TraceLengths(Struct, frozen=True):
    """The lengths in the trace for which the server is measured."""

    prompt_tokens: tuple[int, ...]  # sorted
    context_tokens: tuple[int, ...]  # context tokens of prompts and answers, sorted

    def prompt_at(self, share: float) -> int:
        return self.prompt_tokens[rank_above(share, len(self))]

    def __len__(self) -> int:
        return len(self.prompt_tokens)


class _Part:
    """A share of the measuring time."""

    def __init__(self, seconds: float) -> None:
        self._ends_s = monotonic() + seconds
        self._longest_s = 0.0
        self._last_s = monotonic()

    @property
    def has_time(self) -> bool:
        """Whether there is time for one more case as long as the longest case so far."""
        now_s = monotonic()
        self._longest_s = max(self._longest_s, now_s - self._last_s)
        self._last_s = now_s
        return now_s + self._longest_s <= self._ends_s


async def measure_server(
    door: FrontDoor,
    lengths: TraceLengths,
    seconds: float,
    tell: Callable[[str], None],
    roles: ServerRoles = SINGLE,
) -> MeasuredServer:
    """Measures a server in about `seconds`, or longer if a long prompt takes more than its share.
    If the server's speed has changed meanwhile, says so by `tell` and measures again.

    Raises ServerUnfitError, ConnectionFailedError.
    """
    measured = await _Measurement(door, lengths, seconds, roles).run()
    for _ in range(MOST_AGAIN):
        if measured.is_steady:
            break
        tell(f"a prompt takes {measured.drift:.2g} times as long as before: measuring again")
        measured = await _Measurement(door, lengths, seconds, roles).run()
    if not measured.is_steady:
        tell(
            "the server's speed is not steady, so what comes will differ: other programs on its"
            " machine?"
        )
    return measured


class _Measurement:
    def __init__(
        self, door: FrontDoor, lengths: TraceLengths, seconds: float, roles: ServerRoles
    ) -> None:
        self._door = door
        self._lengths = lengths
        self._seconds = seconds
        self._roles = roles
        self._contention = (1.0, 1.0)
        self._began_s = monotonic()
        self._front_s = 0.0
        self._prefills: list[PrefillSample] = []
        self._decodes: list[DecodeSample] = []
        self._mixed: list[MixedSample] = []
        self._prompt_times_s: dict[int, list[float]] = {}
        self._gap_ratios: list[float] = []
        self._first_gap_ratios: list[float] = []
        self._chunk_tokens = 0
        self._max_sequences, self._limited = 1, False
        self._has_cache, self._hits_said = False, False

    async def run(self) -> MeasuredServer:
        door = self._door
        for _ in range(2):  # the first requests to a server are slower
            await door.ask(door.prompt(SHORTEST_PROMPT), 4)
        self._front_s = await door.round_trip_s()
        await self._measure_prefills()
        handover_s = await self._handover_s()
        await self._measure_cached()
        if self._roles.decoding > 1 and not self._roles.separate:
            await self._measure_together()
        await self._measure_decodes()
        alone = fit_cost(self._prefills, self._decodes)
        await self._measure_chunks(alone)
        cache_tokens, full = await self._fill_cache()
        drift = await self._drift()
        cost = with_decode_curve(
            fit_cost(self._prefills, self._decodes, self._mixed), self._decodes
        )
        return MeasuredServer(
            cost=msgspec.structs.replace(
                cost,
                front_s=self._front_s,
                token_bytes=KV_BYTES_PER_TOKEN,
                shared_memory_bytes_per_s=INSTANT_BYTES_PER_S,
                network_bytes_per_s=INSTANT_BYTES_PER_S,
                decode_spread=self._decode_spread(),
                contention=self._contention,
            ),
            prefills=tuple(self._prefills),
            decodes=tuple(self._decodes),
            chunk_tokens=self._chunk_tokens or DEFAULT_CHUNK_TOKENS,
            max_sequences=self._max_sequences if self._limited else UNLIMITED_SEQUENCES,
            has_cache=self._has_cache,
            cache_tokens=cache_tokens,
            full=full,
            hits_said=self._hits_said,
            handover_s=handover_s,
            seconds=monotonic() - self._began_s,
            chunk_ratios=self._chunk_ratios(cost),
            drift=drift,
        )

    async def _first_token_s(self, prompt: Prompt) -> TimedAnswer:
        return await self._door.ask(prompt, 1)

    async def _measure_prefills(self) -> None:
        """Times single prompts without common prefixes, each length in turn, until this part's time
        is over."""
        part = _Part(PREFILL_SHARE * self._seconds)
        times_s = self._prompt_times_s
        lengths = list(_spread(self._lengths))
        for number in range(MOST_REPEATS * len(lengths)):
            length = lengths[number % len(lengths)]
            answer = await self._first_token_s(self._door.prompt(length))
            self._hits_said = answer.cached_tokens is not None
            times_s.setdefault(length, []).append(answer.ttft_s)
            if not part.has_time and len(times_s) >= min(LEAST_LENGTHS, len(lengths)):
                break
        self._prefills = [
            PrefillSample(num_tokens=length, cached_tokens=0, seconds=self._engine_s(found))
            for length, found in sorted(times_s.items())
        ]

    async def _drift(self) -> float:
        """Returns the time of a prompt now, divided by its time at the beginning."""
        alone = [sample for sample in self._prefills if not sample.cached_tokens]
        first = alone[len(alone) // 2]
        answers = [
            await self._first_token_s(self._door.prompt(first.num_tokens)) for _ in range(HANDOVERS)
        ]
        return self._engine_s([answer.ttft_s for answer in answers]) / first.seconds

    async def _handover_s(self) -> float:
        shortest = self._prefills[0]
        times_s = []
        for _ in range(HANDOVERS):
            prompt = self._door.prompt(shortest.num_tokens)
            answer = await self._door.ask(prompt, HANDOVER_STEPS)
            times_s.append(answer.ttft_s)
            gaps_s = gaps_of(answer.token_s)
            if len(gaps_s) > 2:
                usual_s = max(median(gaps_s[1:]), 1e-6)
                self._first_gap_ratios.append(max(gaps_s[0] / usual_s, LEAST_RATIO))
        return max(self._engine_s(times_s) - shortest.seconds, 0.0)

    async def _measure_cached(self) -> None:
        part = _Part(CACHED_SHARE * self._seconds)
        longest = self._prefills[-1]
        for share in CACHED_PARTS:
            prefix = self._door.prompt(int(share * longest.num_tokens))
            if not prefix or (self._has_cache and not part.has_time):
                break
            await self._first_token_s(prefix)
            times_s, said = [], None
            for _ in range(2):
                rest = self._door.prompt(longest.num_tokens - len(prefix))
                answer = await self._first_token_s([*prefix, *rest])
                times_s.append(answer.ttft_s)
                said = answer.cached_tokens
            seconds = self._engine_s(times_s)
            found = len(prefix) if said is None else said
            expected_s = longest.seconds * (1.0 - HIT_SHARE * found / longest.num_tokens)
            if not found or (said is None and seconds > expected_s):
                break  # the server keeps no prefixes
            self._has_cache = True
            self._prefills.append(
                PrefillSample(num_tokens=longest.num_tokens, cached_tokens=found, seconds=seconds)
            )

    async def _measure_together(self) -> None:
        """Measures by how much longer prompts and decodes take if all mixed instances compute. The
        server places prompts that come together on different instances."""
        computed = [sample for sample in self._prefills if not sample.cached_tokens]
        shortest, longest = computed[0], computed[-1]
        times_s: list[float] = []
        for _ in range(HANDOVERS):
            prompts = [self._door.prompt(longest.num_tokens) for _ in range(self._roles.decoding)]
            times_s += [answer.ttft_s for answer in await self._door.ask_together(prompts, 1)]
        steps_s = []
        for count in (1, self._roles.decoding):
            prompts = [self._door.prompt(shortest.num_tokens) for _ in range(count)]
            num_tokens = self._answer_tokens(shortest.num_tokens, count)
            steps_s.append(common_step_s(await self._door.ask_together(prompts, num_tokens)))
        one_s, all_s = steps_s
        self._contention = (
            max(self._engine_s(times_s) / longest.seconds, 1.0),
            max(all_s / one_s, 1.0) if one_s and all_s else 1.0,
        )

    def _engine_s(self, times_s: Sequence[float]) -> float:
        """Returns the engine's time, without the way to the server and back."""
        return max(median(times_s) - self._front_s, 1e-6)

    async def _measure_decodes(self) -> None:
        """Times answers that decode together, on short prompts and on usual prompts. Both lengths
        of a batch come before the next batch, because only two lengths separate the time that a
        further answer adds from the time that its context adds. Raises ServerUnfitError."""
        part = _Part(DECODE_SHARE * self._seconds)
        usual = self._lengths.prompt_at(0.5)
        lengths = dict.fromkeys((min(SHORTEST_PROMPT, usual), usual))
        for batch, length in product(BATCHES, lengths):
            if self._decodes and not part.has_time:
                break
            count = batch * self._roles.decoding
            if (self._limited and count > self._max_sequences) or not self._fits(length, count):
                continue
            await self._measure_decode(batch, length)
        if not self._decodes:
            raise ServerUnfitError(
                "the server cannot be measured: no answer lasted long enough to time its tokens. It"
                f" has to follow ignore_eos, with a context of {SHORTEST_PROMPT + STEPS} tokens"
            )

    def _fits(self, length: int, batch: int) -> bool:
        longest = self._door.longest_tokens
        return longest is None or length + self._answer_tokens(length, batch) <= longest

    def _answer_tokens(self, length: int, batch: int) -> int:
        """Returns the answer tokens with which the first answer outlasts the last prompt."""
        near = min(self._prefills, key=lambda s: abs(s.num_tokens - length) + s.cached_tokens)
        step_s = min((s.seconds for s in self._decodes), default=near.seconds)
        waiting = int((batch - 1) * near.seconds / step_s) + 1
        return min(STEPS + waiting, MOST_ANSWER_TOKENS)

    async def _measure_decode(self, batch: int, length: int) -> None:
        """Times answers that decode together, `batch` of them on each instance."""
        count = batch * self._roles.decoding
        num_tokens = self._answer_tokens(length, count)
        prompts = [self._door.prompt(length) for _ in range(count)]
        answers = await self._door.ask_together(prompts, num_tokens)
        running = most_at_once(answers)
        self._limited |= running < count and num_tokens < MOST_ANSWER_TOKENS
        self._max_sequences = max(self._max_sequences, running)
        step_s = common_step_s(answers) if running == count else None
        if step_s is not None:
            context = batch * (length + num_tokens // 2)
            alone_s = step_s / self._contention[1]
            self._decodes.append(DecodeSample(batch=batch, context_tokens=context, seconds=alone_s))
            self._gap_ratios += [max(gap_s / step_s, LEAST_RATIO) for gap_s in common_gaps(answers)]

    def _decode_spread(self) -> DecodeSpread:
        usual = equally_likely(self._gap_ratios)
        return usual, usual, tuple(self._first_gap_ratios) if usual else ()

    def _chunk_ratios(self, cost: FittedCost) -> tuple[float, ...]:
        """Returns the times of single steps with prompts over their fitted times, scaled to a mean
        of 1: the few times show the spread, but are too few to correct the fit. Prompts of several
        chunks say less, because their times are sums."""
        chunk_tokens = self._chunk_tokens or DEFAULT_CHUNK_TOKENS
        found = [
            max(self._engine_s([one_s]) / cost.prefill_s(length, 0), LEAST_RATIO)
            for length, times_s in self._prompt_times_s.items()
            if length <= chunk_tokens
            for one_s in times_s
        ]
        if len(found) < LEAST_TIMES:
            return ()
        mean = fmean(found)
        return tuple(sorted(ratio / mean for ratio in found))

    async def _measure_chunks(self, cost: FittedCost) -> None:
        """Sends a long prompt while answers are decoded. On mixed instances this shows how many
        steps compute the prompt, and their times; with separate instances, how much they slow each
        other down. The median of several prompts counts."""
        part = _Part(CHUNK_SHARE * self._seconds)
        alone = max((s for s in self._prefills if not s.cached_tokens), key=lambda s: s.num_tokens)
        copies = self._roles.decoding
        beside = min(BESIDE, self._max_sequences - 1) // copies
        if not beside or alone.seconds > CHUNK_SHARE * self._seconds:
            return
        step_s = max(cost.decode_step_s(beside, beside * SHORTEST_PROMPT), 1e-6)
        num_tokens = min(2 * STEPS + int(2 * alone.seconds / step_s), 2 * MOST_ANSWER_TOKENS)
        wait_s = STEPS // 2 * step_s + beside * copies * cost.prefill_s(SHORTEST_PROMPT, 0)
        pairs = []
        for _ in range(MOST_REPEATS):
            num_beside = beside * copies
            pair = await self._prompt_beside(alone.num_tokens, num_beside, num_tokens, wait_s)
            pairs.append(pair)
            if not part.has_time:
                break
        if self._roles.separate:
            self._contention = contention_of(pairs, alone.seconds, self._front_s)
        else:
            self._note_chunks(alone, beside, num_tokens, pairs)

    def _note_chunks(
        self, alone: PrefillSample, beside: int, num_tokens: int, pairs: Sequence[PromptBeside]
    ) -> None:
        """Notes the size of chunks, and their times beside `beside` answers of `num_tokens`. The
        answers add little to a chunk's time."""
        each_said = (steps_of_prompt(prompt, answer, self._front_s) for prompt, answer in pairs)
        found = [steps for steps in each_said if steps is not None]
        if not found:
            return
        num_steps = median_low([number for number, _ in found])
        seconds = median([seconds / number for number, seconds in found])
        # In all known engines a chunk is a power of two, or the whole prompt.
        each = -(-alone.num_tokens // num_steps)
        self._chunk_tokens = 1 << (each - 1).bit_length() if num_steps > 1 else alone.num_tokens
        self._mixed.append(
            MixedSample(
                num_tokens=each,
                cached_tokens=0,
                batch=beside,
                context_tokens=beside * (SHORTEST_PROMPT + num_tokens // 2),
                seconds=seconds / self._contention[0],
                chunk_s=alone.seconds / num_steps,
            )
        )

    async def _prompt_beside(
        self, length: int, beside: int, num_tokens: int, wait_s: float
    ) -> PromptBeside:
        """Sends a prompt of this length once `beside` answers run; returns it and one of them."""

        async def ask_later() -> TimedAnswer:
            await asyncio.sleep(wait_s)
            return await self._first_token_s(self._door.prompt(length))

        prompts = [self._door.prompt(SHORTEST_PROMPT) for _ in range(beside)]
        answers = self._door.ask_together(prompts, num_tokens)
        (first, *_), long = await asyncio.gather(answers, ask_later())
        return long, first

    async def _fill_cache(self) -> tuple[int, bool]:
        """Sends prompts until the first prompt is no longer cached, then searches for the oldest
        cached prompt. Returns the tokens of the cached prompts, and whether a prompt was lost."""
        told = await self._door.cache_tokens()
        if told or not self._has_cache:
            return told, True
        longest = max(self._prefills, key=lambda s: s.num_tokens - s.cached_tokens)
        sent: list[Prompt] = []
        look = 2
        while monotonic() + 2 * longest.seconds < self._began_s + self._seconds:
            sent.append(self._door.prompt(longest.num_tokens))
            await self._first_token_s(sent[-1])
            if len(sent) < look:
                continue
            look = 2 * look
            if not await self._is_kept(sent[0], longest):
                return await self._num_kept(sent, longest) * longest.num_tokens, True
            # the request that checked this prompt made it the most recently used
            sent = [*sent[1:], sent[0]]
        return len(sent) * longest.num_tokens, False

    async def _num_kept(self, sent: list[Prompt], longest: PrefillSample) -> int:
        """Returns how many of the last prompts are cached. A repeated prompt that is cached becomes
        the most recently used; a prompt that is not cached displaces another."""
        lost, kept, displaced = 0, len(sent), 1
        while kept - lost > 1:
            middle = (lost + kept) // 2
            if await self._is_kept(sent[middle], longest):
                kept = middle
            else:
                lost = middle
                displaced += 1
        return min(len(sent) - kept + displaced, len(sent))

    async def _is_kept(self, prompt: Prompt, longest: PrefillSample) -> bool:
        answer = await self._first_token_s(prompt)
        if answer.cached_tokens is not None:
            return 2 * answer.cached_tokens > len(prompt)
        return answer.ttft_s - self._front_s < HIT_SHARE * longest.seconds


def _spread(lengths: TraceLengths) -> Iterator[int]:
    """Yields lengths from the shortest prompt to the P99, with the middle first."""
    longest = max(lengths.prompt_at(0.99), 2)
    shortest = min(SHORTEST_PROMPT, lengths.prompt_at(0.0), longest)
    ratio = (longest / shortest) ** (1 / (NUM_LENGTHS - 1))
    spread = [round(shortest * ratio**place) for place in range(NUM_LENGTHS)]
    order = (3, NUM_LENGTHS - 1, 0, 4, 2, 1)
    return iter(dict.fromkeys(spread[place] for place in order))


def most_at_once(answers: Sequence[TimedAnswer]) -> int:
    """Returns the most answers that were at one time between their first and their last token."""
    events = [(answer.token_s[0], 1) for answer in answers]
    events += [(answer.token_s[-1], -1) for answer in answers]
    running = most = 0
    for _, change in sorted(events):
        running += change
        most = max(most, running)
    return most


def gaps_of(times_s: Sequence[float]) -> list[float]:
    return [after_s - before_s for before_s, after_s in pairwise(times_s)]


def _common(answers: Sequence[TimedAnswer]) -> list[list[float]]:
    """Returns the times of each answer's tokens while all answers ran."""
    begin_s = max(answer.token_s[0] for answer in answers)
    end_s = min(answer.token_s[-1] for answer in answers)
    return [[s for s in answer.token_s if begin_s <= s <= end_s] for answer in answers]


def common_gaps(answers: Sequence[TimedAnswer]) -> list[float]:
    """Returns the times of single steps while all answers ran, as the first answer shows them."""
    return gaps_of(_common(answers)[0])


def common_step_s(answers: Sequence[TimedAnswer]) -> float | None:
    """Returns the mean step time while all answers ran, or None if this time was too short."""
    found = []
    for kept in _common(answers):
        if len(kept) <= STEPS // 4 or kept[-1] <= kept[0]:
            return None
        found.append((kept[-1] - kept[0]) / (len(kept) - 1))
    return fmean(found)


def contention_of(
    pairs: Sequence[PromptBeside], alone_s: float, front_s: float
) -> tuple[float, float]:
    """Returns the factors by which prompts, and decodes, take longer on separate instances of one
    machine while the other instances compute. `alone_s` is the time of the prompts while nothing
    decodes. A prompt that outlasted its answer does not count."""
    beside = [
        (prompt, answer) for prompt, answer in pairs if prompt.token_s[0] < answer.token_s[-1]
    ]
    prefills = [(prompt.ttft_s - front_s) / alone_s for prompt, _ in beside]
    decodes = []
    for prompt, answer in beside:
        before = [s for s in answer.token_s if s <= prompt.began_s]
        during = [s for s in answer.token_s if prompt.began_s < s <= prompt.token_s[0]]
        if min(len(before), len(during)) > LEAST_GAPS:
            decodes.append(median(gaps_of(during)) / max(median(gaps_of(before)), 1e-6))
    return max(median(prefills or [1.0]), 1.0), max(median(decodes or [1.0]), 1.0)


def steps_of_prompt(
    prompt: TimedAnswer, beside: TimedAnswer, front_s: float
) -> tuple[int, float] | None:
    """Returns the number of steps that computed a prompt, counted by the tokens of another answer,
    and the seconds of these steps, or None if the answer ended before the prompt. The step during
    which the prompt arrived does not count."""
    during_s = [s for s in beside.token_s if prompt.began_s + front_s <= s <= prompt.token_s[0]]
    if not during_s or beside.token_s[-1] <= prompt.token_s[0]:
        return None
    num_steps = max(len(during_s) - 1, 1)
    if len(during_s) == 1:
        return 1, prompt.token_s[0] - prompt.began_s - front_s
    return num_steps, during_s[-1] - during_s[0]
