"""Measures a live cluster through its API, for the profile that a simulation of it needs.

Prompts and decodes of many sizes are timed on the idle cluster and fitted. Some are timed again
while all other instances compute. Instances on one machine share memory bandwidth and cores, so the
ratio of these times is kept as `contention`. A profile of an instance alone would be too
optimistic, and a profile under full load too pessimistic. Times are measured at head and client, so
they include the overheads between steps. The fit never uses the workload of a later comparison.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from math import inf
from random import Random
from statistics import fmean, median
from time import monotonic
from typing import Any

import msgspec

from moonpool.cost.fitted import DecodeSample, FittedCost, PrefillSample, fit_cost
from moonpool.http_client.client import ConnectionFailedError, HttpClient
from moonpool.http_client.trust import untrusted_hint
from moonpool.request_record import RequestRecord
from moonpool.types import RequestId
from moonpool_lab.profiling.decode_curve import with_decode_curve
from moonpool_lab.profiling.learned_decode_steps import RehearsedRequest, step_spread
from moonpool_lab.replay.stream import NO_SLO, TokenTimesReceiver

PROMPTS = (32, 128, 384, 512, 1024, 2048)
CACHED = ((512, 384), (1024, 768), (2048, 1536))  # (prompt tokens, cached tokens)
# (batch, context) of each probe; light loads have small batches, whose times are not linear.
DECODES = (
    *((1, 64), (1, 1024), (2, 64), (2, 512), (3, 128)),
    *((4, 64), (4, 512), (6, 128), (8, 256), (16, 128)),
)
DECODE_TOKENS = 24
WARM_ROUNDS = 5
REPEATS = 3
MOST_REPEATS = 6
SLOW_PROBE_S = 2.0
"""A probe that takes longer is not repeated: its noise is small, and slow machines take minutes."""
LEAST_DECODES = 3
ANSWERED = (64, 1024)
BUSY_PROMPTS = (128, 512, 1024)
BUSY_DECODES = ((1, 64), (4, 512), (8, 256))
REHEARSED = 60  # number of rehearsed requests, in at most REHEARSED_S
REHEARSED_S = 30.0
REHEARSED_LOAD = 0.5
REHEARSED_PROMPT = (32, 1024)
REHEARSED_ANSWER = (8, 32)
BACKGROUND_BATCH = 4
BACKGROUND_TOKENS = 256
PROBED_TOKENS = 4  # of the longest answer to a timed prompt
LEAST_CONTEXT = 640
"""The tokens of a context that has room for every probe of one size."""


class ProfileError(RuntimeError):
    """Says that the cluster could not be measured."""


class LiveProfile(msgspec.Struct, frozen=True):
    """The `cost` for the simulator, and the measurements that it was fitted to.

    `num_blocks` is the size of each memory, of an instance or of an attention worker. Each decoding
    instance has `attention_workers`, and keeps `attention_own_tokens` in its own memory.
    """

    cost: FittedCost
    believed: FittedCost  # the Conductor's own costs
    prefills: tuple[PrefillSample, ...]
    decodes: tuple[DecodeSample, ...]
    busy_ratios: dict[str, list[float]]
    fit_error: dict[str, float]
    num_blocks: int
    block_tokens: int
    seconds: float
    attention_workers: int = 0
    attention_own_tokens: int = 0
    machine_loop_s: float = 0.0  # seconds of a fixed loop (`benchmarks.suite.live.machine_speed`)


@dataclass(frozen=True, slots=True)
class TimedPart:
    """One completed probe, with its times."""

    record: RequestRecord
    stages_s: dict[str, float]
    instants_s: tuple[float, ...]


class LiveProfiler:
    """Measures an idle cluster by its method `measure`."""

    def __init__(self, url: str, longest_tokens: int, ca_file: str = "", api_key: str = "") -> None:
        """Prompts have at most `longest_tokens` tokens, and fit into the model's context. Raises
        ProfileError if `url` or `ca_file` (see `HttpClient`) cannot be used."""
        try:
            self._client = HttpClient(url, api_key, ca_file=ca_file)
        except ValueError as error:
            raise ProfileError(str(error)) from None
        self._longest_tokens = longest_tokens
        self._rng = Random(7)
        self._vocab = 256
        self._instances: list[dict[str, Any]] = []
        # least time from the placement to the report that a prefill has begun
        self._least_start_s = inf

    async def measure(self) -> LiveProfile:
        """Measures the cluster. Raises ProfileError, ConnectionFailedError."""
        began_s = monotonic()
        state = await self._get("/cluster")
        self._instances = state["instances"]
        owned = sum(worker["owner"] is not None for worker in state.get("attention", ()))
        workers = owned // max(self._num_decoders, 1)
        own_tokens = state.get("attention_own_tokens", 0)
        self._take_model((await self._get("/server_info"))["model"])
        for _ in range(WARM_ROUNDS):
            await self._probe_together(self._num_entries, 256, 8)
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
            await self._probe(self._prompt(n), PROBED_TOKENS)
            for n in lengths
            for _ in range(2 * REPEATS)
        ]
        handovers_s = [t.stages_s.get("handover", 0.0) for t in answered]
        # a short prompt may have been computed inline
        handovers_s = [s for s in handovers_s if s > 0.0]
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
            # A client cannot distinguish mixed steps, so their times come from the engine.
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

    def _take_model(self, model: dict[str, Any] | None) -> None:
        """Keeps what probes need to know of the model. Raises ProfileError."""
        url = self._client.url
        if not self._instances or model is None or not model["vocab_size"]:
            text = f"{url} serves no model with a known vocabulary, of which probes draw prompts"
            raise ProfileError(text)
        context = int(model["max_model_tokens"])
        if context < LEAST_CONTEXT:
            text = f"{url} takes at most {context} tokens; a profile needs {LEAST_CONTEXT}"
            raise ProfileError(text)
        self._vocab = model["vocab_size"]
        self._longest_tokens = min(self._longest_tokens, context - PROBED_TOKENS)

    @property
    def _num_entries(self) -> int:
        return sum(i["role"] != "decode" for i in self._instances)

    @property
    def _num_decoders(self) -> int:
        return sum(i["role"] != "prefill" for i in self._instances)

    def _memory_blocks(self, attention_workers: int, own_tokens: int) -> int:
        """Returns the blocks of the smallest memory; `/cluster` gives the sum for an instance."""
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
            hint = untrusted_hint(error)
            text = f"no server answers at {self._client.url}: {error}"
            raise ProfileError(f"{text}; {hint}" if hint else text) from None
        if status in (401, 403):
            text = f"{self._client.url} needs an API key ({status}): give --api-key"
            raise ProfileError(text)
        if status != 200:
            raise ProfileError(f"{path} answers {status}: only a moonpool cluster can be profiled")
        return msgspec.json.decode(body)

    @property
    def _busy_share(self) -> float:
        """Returns the share of an instance's neighbours that decode at the same time."""
        return (self._num_decoders - 1) / max(len(self._instances) - 1, 1)

    def _decode_contention(self, ratios: dict[str, list[float]]) -> float:
        """Returns the contention of decodes with all others busy, against an idle cluster.

        The measured ratios are against decodes with all decoding instances busy.
        """
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
        """Returns the number of answer tokens with which the first answer lasts until the last
        answer has begun."""
        return DECODE_TOKENS + 4 * batch * self._num_decoders

    def _most_tokens(self, batch: int, context: int) -> int:
        """Returns the number of answer tokens with which the batch takes at most half of a pool."""
        pool = self._instances[0]["pool"]
        share = (
            pool["blocks"] * pool["block_tokens"] // (2 * batch) - context - pool["block_tokens"]
        )
        return max(min(int(share), self._longest_tokens - context), 0)

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(self._vocab) for _ in range(num_tokens)]

    async def _probe(
        self, prompt: Sequence[int], num_tokens: int, request_id: str = ""
    ) -> TimedPart:
        record = RequestRecord(RequestId("probe"), len(prompt), NO_SLO, monotonic())
        receiver = TokenTimesReceiver(record)
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
        if receiver.error_code or not receiver.token_s:
            raise ProfileError(f"a probe failed: {receiver.error_message or 'no tokens came'}")
        start_s = receiver.timings_s.get("queue_and_fetch", inf)
        self._least_start_s = min(self._least_start_s, start_s)
        return TimedPart(record, receiver.timings_s, tuple(receiver.token_s))

    async def _probe_together(self, count: int, prompt: int, answer: int) -> list[TimedPart]:
        probes = [self._probe(self._prompt(prompt), answer) for _ in range(count)]
        return list(await asyncio.gather(*probes))

    async def _prefill(self, tokens: int, cached: int) -> PrefillSample:
        """Returns the median of a few prefills, one at a time."""
        times_s, found = [], 0
        prefix = self._prompt(cached)
        if cached:
            await self._probe(prefix, 1)
        for _ in range(REPEATS):
            timed = await self._probe(prefix + self._prompt(tokens - cached), 1)
            times_s.append(prefill_time_s(timed.stages_s, self._least_start_s))
            found = timed.record.cached_tokens
            if times_s[-1] > SLOW_PROBE_S:
                break
        return PrefillSample(num_tokens=tokens, cached_tokens=found, seconds=median(times_s))

    async def _decode(self, batch: int, context: int) -> DecodeSample | None:
        """Times `batch` answers on each decoding instance while all of them run, or returns None if
        that time was too short."""
        count = batch * self._num_decoders
        prompts = [self._prompt(context) for _ in range(count)]
        # The prompts are cached first, so that the answers begin at nearly the same time.
        for prompt in prompts:
            await self._probe(prompt, 1)
        answer, most = self._usual_tokens(batch), self._most_tokens(batch, context)
        steps_s: list[float] = []
        for _ in range(MOST_REPEATS):
            began_s = monotonic()
            probes = [self._probe([*prompt, *self._prompt(1)], answer) for prompt in prompts]
            step_s = common_step_s(await asyncio.gather(*probes))
            if step_s is None:
                answer = min(2 * answer, most)
                continue
            steps_s.append(step_s)
            if len(steps_s) == REPEATS or monotonic() - began_s > SLOW_PROBE_S:
                break
        if not steps_s:
            return None
        middle = context + answer // 2
        return DecodeSample(batch=batch, context_tokens=batch * middle, seconds=median(steps_s))

    async def _rehearse(self, cost: FittedCost) -> list[RehearsedRequest]:
        """Sends requests at random times, at a rate that keeps the prefill instances half busy.

        The rehearsal is needed because steps take longer while requests come and go than in a
        probe.
        """
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

    async def _rehearsed(self, number: int, prompt_tokens: int) -> RehearsedRequest:
        request_id = f"rehearsal-{self._rng.getrandbits(64):x}-{number}"
        num_tokens = self._rng.randrange(*REHEARSED_ANSWER)
        timed = await self._probe(self._prompt(prompt_tokens), num_tokens, request_id)
        state = await self._get(f"/explain/{request_id}")
        since_s = state["since_arrival_s"]
        arrived_s = timed.record.arrived_s
        return RehearsedRequest(
            prefill_instance=state["prefill_instance"],
            decode_instance=state["decode_instance"] or state["prefill_instance"],
            prefill_began_s=arrived_s + since_s["prefill_started"],
            prefill_ended_s=arrived_s + since_s["prefill_done"],
            prompt_tokens=prompt_tokens,
            instants_s=timed.instants_s,
        )

    # Contention

    async def _busy_ratios(
        self, prefills: Sequence[PrefillSample], decodes: Sequence[DecodeSample]
    ) -> dict[str, list[float]]:
        """Returns how much longer steps take while all other instances compute."""
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
        if self._mixed:  # sends one prompt to each instance at the same time
            times_s = []
            for _ in range(REPEATS):
                timed = await self._probe_together(len(self._instances), tokens, 1)
                times_s += [prefill_time_s(t.stages_s, self._least_start_s) for t in timed]
            return median(times_s) / alone.seconds
        count = BACKGROUND_BATCH * self._num_decoders
        async with self._background(count, 64, BACKGROUND_TOKENS):
            busy = await self._prefill(tokens, 0)
        return busy.seconds / alone.seconds

    @asynccontextmanager
    async def _background(self, count: int, prompt: int, answer: int) -> AsyncIterator[None]:
        """Keeps `count` requests in flight."""

        async def again() -> None:
            while True:
                await self._probe(self._prompt(prompt), answer)

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
    """Returns the Conductor's cost model of an instance, from `/cluster`."""
    return msgspec.convert(instance["cost"], FittedCost)


def common_step_s(timed: Sequence[TimedPart]) -> float | None:
    """Returns the mean step time while all answers ran, or None if this time was too short.

    The median of single gaps would be wrong, because a delayed head delivers tokens in bunches.
    """
    begin_s = max(t.instants_s[0] for t in timed)
    end_s = min(t.instants_s[-1] for t in timed)
    found = []
    for t in timed:
        kept = [s for s in t.instants_s if begin_s <= s <= end_s]
        # The second condition is true if all tokens of the answer came together.
        if len(kept) <= DECODE_TOKENS // 2 or kept[-1] <= kept[0]:
            return None
        found.append((kept[-1] - kept[0]) / (len(kept) - 1))
    return fmean(found)


def prefill_time_s(stages_s: Mapping[str, float], least_start_s: float) -> float:
    """Returns the time of a prefill on an idle instance, whose prefills begin `least_start_s` after
    their placement.

    On a busy machine, the reports of its start and its end may reach the head together. The
    prefill's time then lies before the first report, which is late.
    """
    return stages_s["prefill"] + stages_s["queue_and_fetch"] - least_start_s


def _front_s(timed: TimedPart) -> float:
    """Returns the part of the client's TTFT that the head does not account for."""
    ttft_s = timed.record.ttft_s
    assert ttft_s is not None
    return ttft_s - sum(s for name, s in timed.stages_s.items() if name != "decode")


def _typical(ratios: Sequence[float]) -> float:
    return max(median(ratios), 1.0)


def _fit_error(
    cost: FittedCost, prefills: Sequence[PrefillSample], decodes: Sequence[DecodeSample]
) -> dict[str, float]:
    """Returns the largest relative error of the fit at the measured points."""
    prefill = (abs(cost.prefill_s(s.num_tokens, s.cached_tokens) / s.seconds - 1) for s in prefills)
    decode = (abs(cost.decode_step_s(s.batch, s.context_tokens) / s.seconds - 1) for s in decodes)
    return {"prefill": max(prefill), "decode": max(decode)}
