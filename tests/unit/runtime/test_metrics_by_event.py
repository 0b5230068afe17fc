"""Tests that each event changes the right counters by the right amount, and no other counter."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from metric_moves import (
    PATIENCE_S,
    TIME,
    Act,
    answers,
    first_token,
    grown,
    post,
    same,
    says,
)
from played_head import (
    Burst,
    Play,
    PlayedCluster,
    PlayedInstance,
    Step,
    moved,
    played,
)

from moonpool.api.keys import TenantLimits
from moonpool.api.serving_backend import ApiOptions
from moonpool.protocol.messages import (
    AttemptFailed,
    AttemptId,
    AttemptSpec,
    LeaveRequested,
    PrefillStarted,
)
from moonpool.types import FinishReason, Request, RequestId, SamplingParams, Slo


def test_an_answer() -> None:
    same(grown(post(max_tokens=4), says("abcd")), answers(2, 4))


def test_an_answer_that_a_stop_string_ends() -> None:
    """The engine generates some tokens more than the client gets."""
    found = grown(post(max_tokens=9, stop="c"), lambda _: [0.0, 0.01, Burst("abcde"), 9.0])
    expected = answers(2, 3, reason="stop", limit=9)
    same(found, expected | {"vllm:generation_tokens_total": 5.0})


def test_several_choices() -> None:
    """The call counts once in `n`, and each of its requests counts on its own."""
    expected = answers(2, 3, requests=3)
    same(grown(post(max_tokens=3, n=3), says("abc")), expected)


def test_several_prompts() -> None:
    found = grown(post(prompt=["Hi", "Ho"], max_tokens=3), says("abc"))
    expected = answers(2, 3, requests=2) | {
        "vllm:request_params_n_count": 2.0,
        "vllm:request_params_n_sum": 2.0,
        "vllm:request_max_num_generation_tokens_count": 2.0,
        "vllm:request_max_num_generation_tokens_sum": 6.0,
    }
    same(found, expected)


def test_hidden_output() -> None:
    found = grown(post(max_tokens=0, echo=True), says("a"))
    expected = answers(2, 1)
    # absent, because the client gets no token
    del expected["vllm:request_max_num_generation_tokens_sum"]
    same(found, expected)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding(pooling: str) -> None:
    """With mean pooling, all tokens must be computed, so the cache is not used."""
    burst = Burst("", FinishReason.STOP, embedding=b"\0\0\x80?" + b"\0" * 12)
    found = grown(
        post("/v1/embeddings", input="Hi"),
        lambda _: [0.0, 0.01, burst],
        embedding_size=4,
        pooling=pooling,
    )
    expected = answers(2, 1, reason="stop")
    if pooling == "mean":
        del expected["vllm:prefix_cache_queries_total"]
    for name in list(expected):
        if "generation" in name or "params" in name:
            del expected[name]
    same(found, expected)


def test_a_prompt_that_is_cached_in_several_places() -> None:
    """Of 40 tokens 32 are cached: 16 were fetched, 4 came from the SSD, and 12 were on the
    instance."""
    started = PrefillStarted(AttemptId(""), 32, 16, loaded_tokens=4)
    play: Play = lambda _: [started, 0.01, Burst("ab", FinishReason.LENGTH)]  # noqa: E731
    expected = answers(40, 2) | {
        "vllm:prompt_tokens_by_source_total{source=local_compute}": 8.0,
        "vllm:prompt_tokens_by_source_total{source=local_cache_hit}": 16.0,
        "vllm:prompt_tokens_by_source_total{source=external_kv_transfer}": 16.0,
        "vllm:prompt_tokens_cached_total": 32.0,
        "vllm:prompt_tokens_cached_by_source_total{source=device}": 12.0,
        "vllm:prompt_tokens_cached_by_source_total{source=disk}": 4.0,
        "vllm:prompt_tokens_cached_by_source_total{source=p2p}": 16.0,
        "vllm:prefix_cache_hits_total": 32.0,
        "vllm:request_prefill_kv_computed_tokens_sum": 8.0,
        "moonpool:fetched_tokens_total": 16.0,
    }
    same(grown(post(prompt=[*range(1, 41)], max_tokens=2), play), expected)


def test_predictions_are_compared_once() -> None:
    async def run() -> None:
        async with played(says("abcd")) as cluster:
            await post(max_tokens=4)(cluster)
            found = cluster.samples()
            for quantity in ("ttft_s", "tbt_s"):
                label = f"quantity={quantity}"
                assert found["moonpool:predictions_total", label] == 1
                errors = (
                    found["moonpool:predictions_too_much_total", label],
                    found["moonpool:predictions_too_little_total", label],
                )
                assert max(errors) > 0 == min(errors), "it was too high or too low"

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def leaves(when: str) -> Act:
    """Ends the client's connection while its request is in this stage."""

    async def act(cluster: PlayedCluster) -> None:
        body = {"prompt": "Hi", "max_tokens": 9}
        call = asyncio.create_task(cluster.http.post("/v1/completions", json=body))
        conductor = cluster.conductor
        while True:
            await asyncio.sleep(0.001)
            for tracked in conductor.requests.values():
                attempt = tracked.attempt
                begun = attempt is not None and attempt.started_s is not None
                stage = "decode" if tracked.generated else "prefill" if begun else "queue"
                if stage == when:
                    call.cancel()
                    await asyncio.gather(call, return_exceptions=True)
                    assert not conductor.requests
                    return

    return act


@pytest.mark.parametrize("when", ["queue", "prefill", "decode"])
def test_a_client_leaves(when: str) -> None:
    plays: dict[str, Play] = {
        "queue": lambda _: [9.0],
        "prefill": lambda _: [0.0, 9.0],
        "decode": lambda _: [0.0, 0.01, Burst("a"), 9.0],
    }
    expected: dict[str, Any] = {"moonpool:requests_failed_total{reason=abort}": 1.0}
    if when != "queue":
        expected |= {
            "moonpool:wasted_prefills_total": 1.0,
            "moonpool:prefill_seconds_total": TIME,
            "moonpool:wasted_prefill_seconds_total": TIME,
        }
    if when == "decode":
        expected |= first_token(2) | {"vllm:generation_tokens_total": 1.0}
    same(grown(leaves(when), plays[when]), expected)


def refused(status: int, headers: dict[str, str], **body: Any) -> Act:
    async def act(cluster: PlayedCluster) -> None:
        whole = {"prompt": "Hi", "max_tokens": 4, **body}
        response = await cluster.http.post("/v1/completions", json=whole, headers=headers)
        assert response.status_code == status, response.text

    return act


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_refusal_for_want_of_an_instance(n: int, stream: bool) -> None:
    async def act(cluster: PlayedCluster) -> None:
        cluster.instance.report(LeaveRequested(within_s=0.0))  # it waits for good
        cluster.instance.lose()
        await refused(503, {}, n=n, stream=stream)(cluster)

    found = grown(act, says("abcd"))
    same(found, {"moonpool:requests_rejected_total{reason=no_instance}": float(n)})


def test_a_rate_limit() -> None:
    options = ApiOptions(api_keys={"key": "ann"}, limits={"ann": TenantLimits(requests_per_s=0.01)})
    headers = {"authorization": "Bearer key"}

    async def act(cluster: PlayedCluster) -> None:
        cluster.http.headers.update(headers)
        await refused(200, headers)(cluster)
        await refused(429, headers)(cluster)
        await refused(429, headers, stream=True)(cluster)

    expected = answers(2, 4) | {
        "moonpool:requests_rejected_total{reason=rate_limit}": 2.0,
        "vllm:admission_rejections_total{reason=rate_limit}": 2.0,
    }
    same(grown(act, says("abcd"), options), expected)


def test_calls_that_are_wrong_are_no_requests() -> None:
    async def act(cluster: PlayedCluster) -> None:
        for body in ({}, {"prompt": "Hi", "max_tokens": -1}, {"prompt": "Hi", "n": 0}):
            assert (await cluster.http.post("/v1/completions", json=body)).status_code == 400
        assert (await cluster.http.get("/nowhere")).status_code == 404

    same(grown(act, says("abcd")), {})


def test_a_deadline() -> None:
    found = grown(refused(504, {"x-request-timeout-ms": "50"}), lambda _: [0.0, 9.0])
    expected = {
        "moonpool:requests_failed_total{reason=deadline}": 1.0,
        "moonpool:wasted_prefills_total": 1.0,
        "moonpool:prefill_seconds_total": TIME,
        "moonpool:wasted_prefill_seconds_total": TIME,
    }
    same(found, expected)


def fails_once(tokens_before: str = "") -> tuple[Play, list[PlayedInstance]]:
    """Returns a play whose first attempt fails, perhaps after some tokens."""
    own: list[PlayedInstance] = []
    attempts: list[AttemptId] = []

    def play(attempt: AttemptSpec) -> Sequence[Step]:
        left = "abcd"[len(attempt.token_ids) - attempt.num_prompt_tokens :]
        attempts.append(attempt.attempt_id)
        if len(attempts) == 1:
            failed = AttemptFailed(attempt.attempt_id, "engine_error", "oops")
            asyncio.get_running_loop().call_later(0.03, own[0].report, failed)
            return [0.0, 0.005, *([Burst(tokens_before)] if tokens_before else []), 9.0]
        return says(left)(attempt)

    return play, own


@pytest.mark.parametrize("tokens_before", ["", "ab"])
def test_an_attempt_that_is_placed_again(tokens_before: str) -> None:
    play, own = fails_once(tokens_before)

    async def act(cluster: PlayedCluster) -> None:
        own.append(cluster.instance)
        await post(max_tokens=4)(cluster)

    expected = answers(2, 4) | {
        "moonpool:wasted_prefills_total": 1.0,
        "moonpool:wasted_prefill_seconds_total": TIME,
    }
    same(grown(act, play), expected)


def test_an_answer_that_another_head_began() -> None:
    """This head must not count the answer's first token again. The length is that of the full
    answer."""

    async def act(cluster: PlayedCluster) -> None:
        now = cluster.head.now()
        request = Request(
            request_id=RequestId("r"),
            token_ids=(1, 2),
            sampling=SamplingParams(max_tokens=6),
            slo=Slo(ttft_s=30.0, tbt_s=1.0),
            arrived_s=now - 100.0,
            deadline_s=now + 60.0,
        )
        async for _ in cluster.model.submit(request, (97, 98)):
            pass

    expected = answers(2, 4, limit=6) | {
        "vllm:request_generation_tokens_sum": 6.0,
    }
    for name in list(expected):
        if "time_to_first" in name or "params_n" in name or "max_num" in name:
            del expected[name]
    same(grown(act, says("abcd")), expected)


# While a request is under way:


def test_tokens_and_prompts_count_before_the_end_and_never_backwards() -> None:
    async def run() -> None:
        play = says("abcdefghij" * 4, seconds=0.01)
        async with played(play) as cluster:
            body = {"prompt": "Hi", "max_tokens": 40, "stop": "ghijabc"}
            call = asyncio.create_task(cluster.http.post("/v1/completions", json=body))
            generated, prompts, before = [0.0], set(), cluster.samples()
            while not call.done():
                await asyncio.sleep(0.002)
                now = cluster.samples()
                generated.append(now["vllm:generation_tokens_total", ""])
                prompts.add(now["vllm:prompt_tokens_total", ""])
                for (name, labels), value in before.items():
                    if name.endswith(("_total", "_count", "_sum", "_bucket")):
                        assert now[name, labels] >= value, f"{name} went backwards"
                before = now
            assert generated == sorted(generated) and len(set(generated)) > 3
            assert prompts <= {0.0, 2.0}
            grown = moved({}, cluster.samples())
            assert grown["vllm:request_generation_tokens_sum"] == 13
            assert grown["vllm:generation_tokens_total"] >= 13

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_gauges_follow_the_state() -> None:
    async def run() -> None:
        async with played(lambda _: [0.05, 0.0, 0.05, Burst("ab"), 9.0]) as cluster:

            def shown() -> tuple[float, float, float]:
                found = cluster.samples()
                waits = [
                    found["vllm:num_requests_waiting_by_reason", f"reason={reason}"]
                    for reason in ("capacity", "deferred")
                ]
                assert sum(waits) == found["vllm:num_requests_waiting", ""]
                return (found["vllm:num_requests_running", ""], *waits)

            assert shown() == (0, 0, 0)
            body = {"prompt": "Hi", "max_tokens": 9}
            call = asyncio.create_task(cluster.http.post("/v1/completions", json=body))
            seen = set()
            while not any(t.generated for t in cluster.conductor.requests.values()):
                await asyncio.sleep(0.002)
                seen.add(shown())
            assert {(0, 1, 0), (1, 0, 0)} <= seen
            cluster.instance.lose()
            assert shown() == (0, 0, 1), "it waits for the instance"
            assert cluster.samples()["moonpool:instances", "role=mixed"] == 0
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert shown() == (0, 0, 0)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_the_heads_before_this_one_are_counted() -> None:
    async def run() -> None:
        async with played(says("")) as cluster:
            cluster.head.num_restarts, cluster.head.num_upgrades = 3, 2
            found = cluster.samples()
            assert found["moonpool:head_restarts_total", ""] == 3
            assert found["moonpool:head_upgrades_total", ""] == 2
            assert found["moonpool:head_epoch", ""] == cluster.head.standbys.epoch

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
