"""Tests replays to servers that answer, refuse, break off or send wrong figures."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest
from scripted_server import Reply, models, scripted, stream, token_event, whole

from moonpool.config.slo import SloClass
from moonpool.trace.row import TraceRow
from moonpool_lab.replay.player import UnservableError
from moonpool_lab.replay.run import ReplayPlan, run_replay
from moonpool_lab.replay.server import ServerUnfitError, parse_metrics

USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 8,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
}
GOOD = (token_event(1), token_event(2, 3), token_event(finish="length"), USAGE)


def rows(count: int, gap_s: float = 0.0) -> tuple[TraceRow, ...]:
    return tuple(TraceRow(gap_s * i, 8, 3, (0, i + 1)) for i in range(count))


def play(script: Any, count: int = 1, **plan: Any) -> tuple[dict[str, Any], list[Any]]:
    def answer(path: str, headers: dict[str, str], body: Any) -> Reply:
        if path == "/v1/models":
            return models("m")
        if path == "/v1/completions":
            found: Reply = script(len([c for c in server.calls if c[0] == path]), headers, body)
            return found
        return whole(404, {})

    with scripted(answer) as server:
        chosen = {"rows": rows(count), "block_tokens": 4} | plan
        figures = asyncio.run(run_replay(ReplayPlan(url=server.url, **chosen)))
        return figures, [call for call in server.calls if call[0] == "/v1/completions"]


@pytest.mark.parametrize("cut", [0, 1, 7])
def test_a_stream_is_counted_however_it_is_cut(cut: int) -> None:
    figures, calls = play(lambda *_: stream(*GOOD, cut=cut), count=3, slo_tbt_s=60.0)
    assert (figures["completed"], figures["effective"], figures["failed"]) == (3, 3, 0)
    assert figures["output_tokens"] == 9
    cache = figures["cache"]
    assert (cache["input_tokens"], cache["hit_tokens"], cache["hit_ratio"]) == (24, 12, 0.5)
    body = calls[0][2]
    assert body["max_tokens"] == 3 and body["ignore_eos"] and body["stream"]
    assert len(body["prompt"]) == 8
    assert calls[1][2]["prompt"][:4] == body["prompt"][:4]


def test_text_counts_where_a_server_tells_no_ids() -> None:
    events = [{"choices": [{"text": "x", "finish_reason": None}]} for _ in range(4)]
    events.append({"choices": [{"text": "", "finish_reason": "stop"}]})
    figures, _ = play(lambda *_: stream(*events))
    assert figures["completed"] == 1 and figures["output_tokens"] == 4


def refusal(status: int = 429) -> bytes:
    error = {"message": "too much", "type": "rate_limit_error", "code": "ttft_slo"}
    return whole(status, {"error": error}, "Retry-After: 0.05")


def test_a_rejection_is_an_outcome() -> None:
    figures, _ = play(lambda number, *_: refusal() if number == 1 else stream(*GOOD), count=2)
    assert figures["rejected_by_reason"] == {"ttft_slo": 1}
    assert (figures["completed"], figures["failed"], figures["resent"]) == (1, 0, 0)


def test_retry_after_is_honoured_and_counts_as_waiting() -> None:
    figures, calls = play(
        lambda number, *_: refusal(503) if number < 3 else stream(*GOOD), retries=2
    )
    assert (figures["completed"], figures["resent"], len(calls)) == (1, 2, 3)
    assert figures["ttft_s"]["mean"] > 0.1


@pytest.mark.parametrize("told", ["nan", "inf"])
def test_a_retry_after_that_is_no_time_counts_as_none(told: str) -> None:
    def script(number: int, *_: Any) -> Reply:
        refusal = whole(429, {}, f"Retry-After: {told}")
        return refusal if number == 1 else stream(*GOOD)

    figures, _ = play(script, retries=1)
    assert figures["completed"] == 1


def test_retries_end() -> None:
    figures, calls = play(lambda *_: refusal(), retries=2)
    assert figures["rejected"] == 1 and len(calls) == 3


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b""], "connection"),
        (stream(token_event(1)), "broken_off"),
        (stream(token_event(1), {"error": {"message": "lost", "code": "instance_lost"}}), "lost"),
        (stream(token_event(1), "nonsense"), "bad_event"),
        ([b"nonsense\r\n\r\n", b""], "not HTTP"),
        (whole(500, {"error": {"message": "oops", "type": "server_error"}}), "oops"),
        (whole(400, {"detail": "bad field"}), "http_400: bad field"),
    ],
)
def test_what_goes_wrong_is_told(reply: Reply, error: str) -> None:
    figures, _ = play(lambda *_: reply)
    assert (figures["completed"], figures["failed"]) == (0, 1)
    assert error in next(iter(figures["errors"]))


def test_a_silent_server_ends_by_the_limit() -> None:
    figures, _ = play(lambda *_: stream(*[token_event(1)] * 200), timeout_s=0.05)
    assert next(iter(figures["errors"])).startswith("timeout")


def test_a_wrong_key_ends_the_run_at_once() -> None:
    with pytest.raises(UnservableError, match="401: no such key"):
        play(lambda *_: whole(401, {"error": {"message": "no such key"}}), count=3)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (whole(401, {}), "API key"),
        (models("a", "b"), "a, b"),
        (whole(200, {}), "no models"),
        (whole(200, {"data": None}), "no models"),
        (whole(200, {"data": [None, "a", {"id": 3}]}), "no models"),
    ],
)
def test_a_server_that_cannot_be_used(reply: bytes, error: str) -> None:
    with scripted(lambda *_: reply) as server:
        plan = ReplayPlan(url=server.url, rows=rows(1), block_tokens=4, model="c")
        with pytest.raises(ServerUnfitError, match=error):
            asyncio.run(run_replay(plan))


def test_key_and_slo_travel_as_headers() -> None:
    _, calls = play(lambda *_: stream(*GOOD), api_key="s3", slo_ttft_s=2.0, slo_tbt_s=0.25)
    headers = calls[0][1]
    assert headers["authorization"] == "Bearer s3"
    assert (headers["x-slo-ttft-ms"], headers["x-slo-tpot-ms"]) == ("2000", "250")


def test_each_class_travels_with_its_own_slo_and_is_counted() -> None:
    own, other = rows(2)
    classes = (SloClass("chat", 60.0, 60.0), SloClass("sales", 1e-6, 60.0))
    named = (
        msgspec.structs.replace(own, slo_class="chat", tenant="sales"),
        msgspec.structs.replace(other, tenant="sales"),
    )
    figures, calls = play(lambda *_: stream(*GOOD), rows=named, slo_classes=classes)
    sent = {call[1]["x-slo-ttft-ms"] for call in calls}
    assert sent == {"60000", "0.001"}
    found = figures["slo_classes"]
    assert {name: (one["requests"], one["effective"]) for name, one in found.items()} == {
        "chat": (1, 1),
        "sales": (1, 0),
    }


def test_it_is_an_open_loop_and_slots_are_bounded() -> None:
    def slow(*_: Any) -> Reply:
        return stream(*GOOD)

    figures, _ = play(slow, count=20, rows=rows(20, gap_s=0.01), concurrency=1)
    assert figures["completed"] == 20
    assert figures["client"]["peak_in_flight"] == 1
    assert figures["simulated_s"] >= 0.19
    free, _ = play(slow, count=20, rows=rows(20, gap_s=0.0), concurrency=20)
    assert free["client"]["peak_in_flight"] > 5 and free["client"]["delayed"] == 0


def test_tools_run_before_a_call_for_which_there_was_no_slot_in_time() -> None:
    """The second call of the first session is read only after the first call has ended."""
    turns = [("a", 0, ()), ("b", 0, ()), ("a", 1, ("a0",)), ("b", 1, ("b0",))]
    played = tuple(
        TraceRow(0.0, 8, 3, (0, n), session=name, call=f"{name}{turn}", after=after, delay_s=0.4)
        for n, (name, turn, after) in enumerate(turns)
    )
    figures, _ = play(lambda *_: stream(*GOOD), count=4, rows=played, concurrency=1)
    assert figures["completed"] == 4
    assert figures["simulated_s"] >= 0.4


def test_stopping_keeps_what_there_is() -> None:
    def answer(path: str, headers: dict[str, str], body: Any) -> Reply:
        return models("m") if path == "/v1/models" else stream(*GOOD)

    with scripted(answer) as server:

        async def main() -> dict[str, Any]:
            loop = asyncio.get_running_loop()
            plan = ReplayPlan(url=server.url, rows=rows(100, gap_s=0.1), block_tokens=4)
            return await run_replay(
                plan, lambda stop: threading.Timer(0.3, loop.call_soon_threadsafe, (stop,)).start()
            )

        figures = asyncio.run(main())
    assert figures["interrupted"] and 1 <= figures["completed"] < 10


def test_metrics_are_read_without_the_models_name() -> None:
    text = (
        '# HELP x y\nvllm:prompt_tokens_total{model_name="a,b"} 5.0\n'
        'moonpool:requests_rejected_total{model_name="m",reason="ttft_slo"} 2.0\n'
        'h_bucket{le="1.0",model_name="m"} 7\nprocess_x 1e3\n'
    )
    assert parse_metrics(text) == {
        "vllm:prompt_tokens_total": 5.0,
        "moonpool:requests_rejected_total{ttft_slo}": 2.0,
        "process_x": 1000.0,
    }
