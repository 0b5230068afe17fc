"""Measures a live cluster through its own front door: what a simulation of it needs to know.

Prompts and decodes of many sizes are timed while the cluster is otherwise idle, and fitted. Some
are timed again while all other instances compute: on one machine they share memory bandwidth and
cores, and the ratio is kept as `contention`, because a profile of an instance alone is too
optimistic and one under full load too pessimistic. Times are the head's and the client's, so steps
come with all that happens between them. Nothing is fitted to the workload that is compared later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random
from statistics import fmean, median
from time import monotonic
from typing import Any

import msgspec

from moonpool.bench.rehearsal import Rehearsed, step_spread
from moonpool.cost.decode_curve import with_decode_curve
from moonpool.cost.fitted import DecodeSample, FittedCost, PrefillSample, fit_cost
from moonpool.metrics import RequestRecord
from moonpool.replay.connection import ConnectionFailedError, HttpClient
from moonpool.replay.stream import CompletionReceiver
from moonpool.types import RequestId, Slo

PROMPTS = (32, 128, 384, 512, 1024, 2048)
CACHED = ((512, 384), (1024, 768), (2048, 1536))  # prompt tokens, of which cached
# Batch, context of each; light loads live in the small ones, and steps are not linear in them.
DECODES = (
    *((1, 64), (1, 1024), (2, 64), (2, 512), (3, 128)),
    *((4, 64), (4, 512), (6, 128), (8, 256), (16, 128)),
)
DECODE_TOKENS = 24
REPEATS = 3
MOST_REPEATS = 6
LEAST_DECODES = 3
ANSWERED = (64, 1024)
BUSY_PROMPTS = (128, 512, 1024)
BUSY_DECODES = ((1, 64), (4, 512), (8, 256))
REHEARSED = 60  # requests, for at most so many seconds
REHEARSED_S = 30.0
REHEARSED_LOAD = 0.5
REHEARSED_PROMPT = (32, 1024)
REHEARSED_ANSWER = (8, 32)
BACKGROUND_BATCH = 4
BACKGROUND_TOKENS = 256
NO_SLO = Slo(ttft_s=1e6, tbt_s=1e6)


class ProfileError(RuntimeError):
    """The cluster could not be measured."""


class LiveProfile(msgspec.Struct, frozen=True):
    """`cost` for the simulator; the rest says what it rests on. `num_blocks`: of each memory, an
    instance's own or an attention worker's; `attention_workers`: of each instance that decodes,
    which keeps `attention_own_tokens` beside them."""

    cost: FittedCost
    believed: FittedCost  # the Conductor's own
    prefills: tuple[PrefillSample, ...]
    decodes: tuple[DecodeSample, ...]
    busy_ratios: dict[str, list[float]]
    fit_error: dict[str, float]
    num_blocks: int
    block_tokens: int
    seconds: float
    attention_workers: int = 0
    attention_own_tokens: int = 0
    machine_loop_s: float = 0.0  # `bench.machine_speed`, while it was taken


@dataclass(frozen=True, slots=True)
class _Timed:
    """One completed probe."""

    record: RequestRecord
    stages_s: dict[str, float]
    instants_s: tuple[float, ...]


class _Receiver(CompletionReceiver):
    """Keeps each token's instant, too."""

    def __init__(self, record: RequestRecord) -> None:
        super().__init__(record)
        self.instants_s: list[float] = []

    def on_body(self, data: bytes, now_s: float) -> None:
        before = self.record.num_generated_tokens
        super().on_body(data, now_s)
        self.instants_s += [now_s] * (self.record.num_generated_tokens - before)


class LiveProfiler:
    """Use `measure` on an idle cluster."""

    def __init__(self, url: str, longest_tokens: int) -> None:
        """Prompts are at most `longest_tokens` long. Raises ProfileError for what is no URL."""
        try:
            self._client = HttpClient(url)
        except ValueError as error:
            raise ProfileError(str(error)) from None
        self._longest_tokens = longest_tokens
        self._rng = Random(7)
        self._vocab = 256
        self._instances: list[dict[str, Any]] = []

    async def measure(self) -> LiveProfile:
        """Raises ProfileError, ConnectionFailedError."""
        began_s = monotonic()
        told = await self._get("/cluster")
        self._instances = told["instances"]
        owned = sum(worker["owner"] is not None for worker in told.get("attention", ()))
        workers = owned // max(self._num_decoders, 1)
        own_tokens = told.get("attention_own_tokens", 0)
        self._vocab = (await self._get("/server_info"))["model"]["vocab_size"]
        for _ in range(2):
            await self._together(self._num_entries, 256, 8)  # warm
        prefills = [await self._prefill(n, 0) for n in self._fitting(PROMPTS)]
        for tokens, cached in CACHED:
            if tokens <= self._longest_tokens:
                prefills.append(await self._prefill(tokens, cached))
        tried = [await self._decode(*point) for point in DECODES if self._fits(*point)]
        decodes = [sample for sample in tried if sample is not None]
        if len(decodes) < LEAST_DECODES:
            raise ProfileError(
                f"only {len(decodes)} batches of {len(tried)} ran together long enough: the pool is"
                " too small (raise --kv-tokens) or the machine too busy"
            )
        ratios = await self._busy_ratios(prefills, decodes)
        lengths = self._fitting(ANSWERED)
        answered = [
            await self._ask(self._prompt(n), 4) for n in lengths for _ in range(2 * REPEATS)
        ]
        handovers_s = [t.stages_s.get("handover", 0.0) for t in answered]
        handovers_s = [s for s in handovers_s if s > 0.0]  # a short prompt may have run inline
        contention = _typical(ratios["prefill"]), self._decode_contention(ratios)
        decodes = [self._alone(sample, contention[1]) for sample in decodes]
        cost = with_decode_curve(fit_cost(prefills, decodes), decodes)
        cost = msgspec.structs.replace(cost, contention=contention)
        rehearsed = await self._rehearse(cost)
        believed = believed_cost(self._instances[0])
        found = msgspec.structs.replace(
            cost,
            decode_spread=step_spread(rehearsed, cost, len(self._instances)),
            control_latency_s=median(handovers_s) / 3 if handovers_s else 0.0,
            front_s=max(median(_front_s(t) for t in answered), 0.0),
            token_bytes=self._token_bytes,
            # Steps of both kinds cannot be told apart from outside: as the engine measured them.
            mixed=believed.mixed,
            tile_tokens=believed.tile_tokens,
        )
        self._client.close()
        return LiveProfile(
            cost=found,
            believed=believed,
            prefills=tuple(prefills),
            decodes=tuple(decodes),
            busy_ratios=ratios,
            fit_error=_fit_error(cost, prefills, decodes),
            num_blocks=self._memory_blocks(workers, own_tokens),
            block_tokens=self._instances[0]["pool"]["block_tokens"],
            seconds=monotonic() - began_s,
            attention_workers=workers,
            attention_own_tokens=own_tokens,
        )

    # The cluster

    @property
    def _num_entries(self) -> int:
        return sum(i["role"] != "decode" for i in self._instances)

    @property
    def _num_decoders(self) -> int:
        return sum(i["role"] != "prefill" for i in self._instances)

    def _memory_blocks(self, attention_workers: int, own_tokens: int) -> int:
        """Blocks at attention workers are told as their instance's, with its own."""
        memories = max(attention_workers, 1)
        own = -(-own_tokens // self._instances[0]["pool"]["block_tokens"])
        return min(
            int(i["pool"]["blocks"])
            if i["role"] == "prefill"
            else (int(i["pool"]["blocks"]) - own) // memories
            for i in self._instances
        )

    @property
    def _mixed(self) -> bool:
        return any(i["role"] == "mixed" for i in self._instances)

    @property
    def _token_bytes(self) -> int:
        pool = self._instances[0]["pool"]
        return int(pool["block_bytes"] // pool["block_tokens"])

    async def _get(self, path: str) -> Any:
        try:
            status, body = await self._client.get(path)
        except ConnectionFailedError as error:
            raise ProfileError(f"no server answers at {self._client.url}: {error}") from None
        if status != 200:
            raise ProfileError(f"{path} answers {status}: only a moonpool cluster can be profiled")
        return msgspec.json.decode(body)

    @property
    def _busy_share(self) -> float:
        """Of an instance's neighbours, those that decode while it does: none can be asked alone."""
        return (self._num_decoders - 1) / max(len(self._instances) - 1, 1)

    def _decode_contention(self, ratios: dict[str, list[float]]) -> float:
        """Of decodes beside all others, against alone, from ratios against decodes beside those
        that decode."""
        ratio, share = _typical(ratios["decode"]), self._busy_share
        if self._mixed or share >= 1.0 or ratio * share >= 0.9:
            return ratio
        return ratio * (1.0 - share) / (1.0 - ratio * share)

    def _alone(self, sample: DecodeSample, contention: float) -> DecodeSample:
        slower = 1.0 + (contention - 1.0) * self._busy_share
        return msgspec.structs.replace(sample, seconds=sample.seconds / slower)

    # Probes

    def _fitting(self, lengths: Sequence[int]) -> list[int]:
        return [n for n in lengths if n <= self._longest_tokens]

    def _fits(self, batch: int, context: int) -> bool:
        most = self._most_tokens(batch, context)
        return context + most <= self._longest_tokens and most >= self._usual_tokens(batch)

    def _usual_tokens(self, batch: int) -> int:
        """Of an answer, so that the first still runs when the last one begins."""
        return DECODE_TOKENS + 4 * batch * self._num_decoders

    def _most_tokens(self, batch: int, context: int) -> int:
        """Of an answer, so that the batch takes no more than half of a pool."""
        pool = self._instances[0]["pool"]
        share = (
            pool["blocks"] * pool["block_tokens"] // (2 * batch) - context - pool["block_tokens"]
        )
        return max(min(int(share), self._longest_tokens - context), 0)

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(self._vocab) for _ in range(num_tokens)]

    async def _ask(self, prompt: Sequence[int], num_tokens: int, request_id: str = "") -> _Timed:
        record = RequestRecord(RequestId("probe"), len(prompt), NO_SLO, monotonic())
        receiver = _Receiver(record)
        body = msgspec.json.encode(
            {
                "prompt": prompt,
                "stream": True,
                "stream_options": {"include_usage": True},
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "max_tokens": num_tokens,
            }
        )
        headers = b"X-SLO-TTFT-ms: 1e9\r\nX-SLO-TPOT-ms: 1e9\r\n"
        if request_id:
            headers += b"X-Request-Id: %b\r\n" % request_id.encode()
        await self._client.post("/v1/completions", body, receiver, headers)
        receiver.on_end()
        if receiver.error_code or not receiver.instants_s:
            raise ProfileError(f"a probe failed: {receiver.error_message or 'no tokens came'}")
        return _Timed(record, receiver.timings_s, tuple(receiver.instants_s))

    async def _together(self, count: int, prompt: int, answer: int) -> list[_Timed]:
        asked = [self._ask(self._prompt(prompt), answer) for _ in range(count)]
        return list(await asyncio.gather(*asked))

    async def _prefill(self, tokens: int, cached: int) -> PrefillSample:
        """The typical of a few, one at a time."""
        times_s, found = [], 0
        prefix = self._prompt(cached)
        if cached:
            await self._ask(prefix, 1)
        for _ in range(REPEATS):
            timed = await self._ask(prefix + self._prompt(tokens - cached), 1)
            times_s.append(timed.stages_s["prefill"])
            found = timed.record.cached_tokens
        return PrefillSample(num_tokens=tokens, cached_tokens=found, seconds=median(times_s))

    async def _decode(self, batch: int, context: int) -> DecodeSample | None:
        """`batch` answers on each decoding instance, timed while all of them run; None if they
        never did for long."""
        count = batch * self._num_decoders
        prompts = [self._prompt(context) for _ in range(count)]
        for prompt in prompts:  # so that the answers begin nearly together
            await self._ask(prompt, 1)
        answer, most = self._usual_tokens(batch), self._most_tokens(batch, context)
        steps_s: list[float] = []
        for _ in range(MOST_REPEATS):
            asked = [self._ask([*prompt, *self._prompt(1)], answer) for prompt in prompts]
            step_s = _common_step_s(await asyncio.gather(*asked))
            if step_s is None:
                answer = min(2 * answer, most)
                continue
            steps_s.append(step_s)
            if len(steps_s) == REPEATS:
                break
        if not steps_s:
            return None
        middle = context + answer // 2
        return DecodeSample(batch=batch, context_tokens=batch * middle, seconds=median(steps_s))

    async def _rehearse(self, cost: FittedCost) -> list[Rehearsed]:
        """Requests that come as they like, so that the prefill pool is half busy: what a step takes
        while clients come and go is not what it takes in a probe."""
        longest = max(min(REHEARSED_PROMPT[1], self._longest_tokens // 2), REHEARSED_PROMPT[0])
        rng = self._rng
        tasks, spent_s = [], 0.0
        for number in range(REHEARSED):
            prompt = int(REHEARSED_PROMPT[0] * (longest / REHEARSED_PROMPT[0]) ** rng.random())
            tasks.append(asyncio.create_task(self._rehearsed(number, prompt)))
            pause_s = cost.prefill_s(prompt, 0) / (REHEARSED_LOAD * self._num_entries)
            spent_s += pause_s
            if spent_s > REHEARSED_S:
                break
            await asyncio.sleep(pause_s * rng.expovariate(1.0))
        return list(await asyncio.gather(*tasks))

    async def _rehearsed(self, number: int, prompt_tokens: int) -> Rehearsed:
        request_id = f"rehearsal-{self._rng.getrandbits(64):x}-{number}"
        num_tokens = self._rng.randrange(*REHEARSED_ANSWER)
        timed = await self._ask(self._prompt(prompt_tokens), num_tokens, request_id)
        told = await self._get(f"/explain/{request_id}")
        since_s = told["since_arrival_s"]
        arrived_s = timed.record.arrived_s
        return Rehearsed(
            prefill_instance=told["prefill_instance"],
            decode_instance=told["decode_instance"] or told["prefill_instance"],
            prefill_began_s=arrived_s + since_s["prefill_started"],
            prefill_ended_s=arrived_s + since_s["prefill_done"],
            prompt_tokens=prompt_tokens,
            instants_s=timed.instants_s,
        )

    # Together with others

    async def _busy_ratios(
        self, prefills: Sequence[PrefillSample], decodes: Sequence[DecodeSample]
    ) -> dict[str, list[float]]:
        """How much longer the same takes while all other instances compute."""
        ratios: dict[str, list[float]] = {"prefill": [], "decode": []}
        if len(self._instances) < 2:
            return {"prefill": [1.0], "decode": [1.0]}
        alone_s = {(s.num_tokens, s.cached_tokens): s.seconds for s in prefills}
        for tokens in self._fitting(BUSY_PROMPTS):
            if (tokens, 0) in alone_s or self._mixed:
                ratios["prefill"].append(await self._busy_prefill(tokens))
        by_batch = {s.batch: s for s in decodes if not self._mixed}
        for batch, context in BUSY_DECODES:
            if batch in by_batch and self._fits(batch, context):
                alone = await self._decode(batch, context)
                async with self._background(self._num_entries, 512, 1):
                    busy = await self._decode(batch, context)
                if alone is not None and busy is not None:
                    ratios["decode"].append(busy.seconds / alone.seconds)
        ratios["decode"] = ratios["decode"] or ratios["prefill"]
        return ratios

    async def _busy_prefill(self, tokens: int) -> float:
        alone = await self._prefill(tokens, 0)
        if self._mixed:  # one prompt on each instance at once
            times_s = []
            for _ in range(REPEATS):
                timed = await self._together(len(self._instances), tokens, 1)
                times_s += [t.stages_s["prefill"] for t in timed]
            return median(times_s) / alone.seconds
        count = BACKGROUND_BATCH * self._num_decoders
        async with self._background(count, 64, BACKGROUND_TOKENS):
            busy = await self._prefill(tokens, 0)
        return busy.seconds / alone.seconds

    @asynccontextmanager
    async def _background(self, count: int, prompt: int, answer: int) -> AsyncIterator[None]:
        """Keeps `count` requests under way."""

        async def again() -> None:
            while True:
                await self._ask(self._prompt(prompt), answer)

        tasks = [asyncio.create_task(again()) for _ in range(count)]
        await asyncio.sleep(0.2)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task


def believed_cost(instance: dict[str, Any]) -> FittedCost:
    """Of an instance as `/cluster` describes it."""
    return msgspec.convert(instance["cost"], FittedCost)


def _common_step_s(timed: Sequence[_Timed]) -> float | None:
    """Mean time of a step while all answers ran; None if they hardly did. Not the median of single
    gaps: a head that is held up delivers tokens in bunches."""
    begin_s = max(t.instants_s[0] for t in timed)
    end_s = min(t.instants_s[-1] for t in timed)
    found = []
    for t in timed:
        kept = [s for s in t.instants_s if begin_s <= s <= end_s]
        if len(kept) <= DECODE_TOKENS // 2:
            return None
        found.append((kept[-1] - kept[0]) / (len(kept) - 1))
    return fmean(found)


def _front_s(timed: _Timed) -> float:
    """What the client waited for its first token beyond what the head accounts for."""
    ttft_s = timed.record.ttft_s
    assert ttft_s is not None
    return ttft_s - sum(s for name, s in timed.stages_s.items() if name != "decode")


def _typical(ratios: Sequence[float]) -> float:
    return max(median(ratios), 1.0)


def _fit_error(
    cost: FittedCost, prefills: Sequence[PrefillSample], decodes: Sequence[DecodeSample]
) -> dict[str, float]:
    """Largest relative error of the fit at what was measured."""
    prefill = (abs(cost.prefill_s(s.num_tokens, s.cached_tokens) / s.seconds - 1) for s in prefills)
    decode = (abs(cost.decode_step_s(s.batch, s.context_tokens) / s.seconds - 1) for s in decodes)
    return {"prefill": max(prefill), "decode": max(decode)}
