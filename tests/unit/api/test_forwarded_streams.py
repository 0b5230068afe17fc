"""Tests forwarded calls over time: silences, clients that come back, and heads that end."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from scripted_head import ScriptedHead, Step, call, served, wait_until
from shelf import Shelf
from test_kept_answers import Keeper
from test_resumption import NO_SHRINKING, PERIOD_S, SometimesSilent, cut_of, go_on, respond, shares

from moonpool.api.connection.kept_answers import KeptAnswers
from moonpool.api.connection.kept_stream import digest_of
from moonpool.api.connection.poison import MAX_ENDED
from moonpool.api.serving_backend import ApiOptions, Output, RequestRefused
from moonpool.protocol.model_offer import MEDIA_PATHS
from moonpool.types import FinishReason, Request, Token

OFTEN = ApiOptions(keepalive_s=0.02)
CHAT = "/v1/chat/completions"
PATHS = [CHAT, "/v1/responses", "/v1/messages"]
EVENTS = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % n for n in range(4)]
END = Output(finish_reason=FinishReason.STOP)
REFUSED = RequestRefused(429, "slo_ttft", "too late", 3.0)


def part(payload: bytes, is_first: bool = False, kind: bytes = b"text/event-stream") -> Output:
    return Output(tokens=(Token(0, payload=kind + b"\n" + payload if is_first else payload),))


def parts(*events: bytes) -> list[Step]:
    return [part(event, not number) for number, event in enumerate(events)]


def forwarding(*steps: Step) -> ScriptedHead:
    return made_to_forward(ScriptedHead(lambda _: list(steps)))


def made_to_forward(head: ScriptedHead) -> ScriptedHead:
    head.card = structs.replace(head.card, forwards=(*MEDIA_PATHS, "/score"), max_model_tokens=4096)
    return head


def look(path: str = CHAT, stream: bool = True) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    said = [{"role": "user", "content": [image]}]
    return {"input" if path == "/v1/responses" else "messages": said, "stream": stream}


def comment(path: str) -> bytes:
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'
    return ping if path == "/v1/messages" else b": prefill\n\n"


@contextmanager
def asked(head: ScriptedHead, path: str, *gates: threading.Event) -> Iterator[httpx.Response]:
    """Returns the response of a stream as soon as it has a header."""
    with (
        served(head, OFTEN) as url,
        httpx.stream("POST", url + path, json=look(path), timeout=60) as response,
    ):
        try:
            yield response
        finally:
            for gate in gates:
                gate.set()


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_speaks_before_its_first_part_and_between_two(path: str) -> None:
    """Keeps the server silent until the client has received two keep-alives of the head."""
    first, second = threading.Event(), threading.Event()
    one, *rest = parts(*EVENTS)
    head = forwarding(first, one, second, *rest, END)
    raw = b""
    with asked(head, path, first, second) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        for piece in response.iter_raw():
            raw += piece
            if raw.count(comment(path)) >= 2:
                first.set()
            begun, _, after = raw.partition(EVENTS[0])
            if after.count(comment(path)) >= 2:
                second.set()
    assert begun.startswith(comment(path) * 2)
    assert raw.replace(comment(path), b"") == b"".join(EVENTS)


def test_a_refusal_before_the_placement_has_its_own_status() -> None:
    gate = threading.Event()
    head = forwarding(gate, REFUSED)
    head.is_placed = False
    threading.Timer(0.3, gate.set).start()  # waits many periods, in which no keep-alive may be sent
    with asked(head, CHAT, gate) as response:
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"


@pytest.mark.parametrize("path", PATHS)
def test_a_refusal_after_a_comment_is_an_event(path: str) -> None:
    gate, raw = threading.Event(), b""
    with asked(forwarding(gate, REFUSED), path, gate) as response:
        assert response.status_code == 200
        for piece in response.iter_raw():
            raw += piece
            gate.set()
    assert raw.replace(comment(path), b"").count(b"too late") == 1


def test_it_can_be_turned_off_and_whole_answers_are_left_alone() -> None:
    answer = call(
        forwarding(0.2, *parts(*EVENTS), END), CHAT, look(), options=ApiOptions(keepalive_s=0)
    )
    assert answer.content == b"".join(EVENTS)
    whole = forwarding(0.2, part(b'{"a":1}', True, b"application/json"), END)
    answer = call(whole, CHAT, look(stream=False), options=OFTEN)
    assert answer.content == b'{"a":1}'


# Clients that come back:


LARGE = b"x" * (24 << 20)
"""More bytes than the buffers of a connection hold."""


def leave_early(url: str, body: dict[str, Any]) -> None:
    """Sends the call, and leaves when the first bytes of its answer arrive."""
    host, port = url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(
            b"POST %b HTTP/1.1\r\nhost: x\r\nx-request-id: a\r\ncontent-length: %d\r\n\r\n%b"
            % (CHAT.encode(), len(raw), raw)
        )
        assert sock.recv(100)


def again(url: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    named = {"x-request-id": "a", "content-type": "application/json"} | headers
    return httpx.post(url + CHAT, content=json.dumps(body), headers=named, timeout=60)


@pytest.mark.parametrize("stream", [True, False])
def test_a_whole_answer_that_was_lost_comes_again(stream: bool) -> None:
    kind = b"text/event-stream" if stream else b"application/json"
    said = structs.replace(part(LARGE, True, kind), finish_reason=FinishReason.STOP)
    head, keeper = forwarding(said), Keeper()
    with served(head, OFTEN, keeper) as url:
        leave_early(url, look(stream=stream))
        assert wait_until(lambda: len(keeper.cut_numbers) == 1)
        answer = again(url, look(stream=stream))
        assert (answer.status_code, answer.content == LARGE) == (200, True)
        assert answer.headers["content-type"].startswith(kind.decode())
        assert len(head.calls) == 1, "the server has computed it once"
        assert wait_until(lambda: not keeper.held and not keeper.num_bytes)
        assert again(url, look(stream=stream)).content == LARGE
        assert len(head.calls) == 2, "its client has had the first one"


def test_an_answer_that_broke_off_is_computed_anew() -> None:
    """The known part of the answer must be dropped, because it is of no use and takes room."""
    gate = threading.Event()
    one, *rest = parts(*EVENTS)
    head, keeper = forwarding(one, gate, *rest, END), Keeper()
    with served(head, ApiOptions(keepalive_s=0), keeper) as url:
        leave_early(url, look())
        assert wait_until(lambda: len(head.aborted) == 1)
        assert wait_until(lambda: not keeper.held and not keeper.num_bytes)
        gate.set()
        assert again(url, look()).content == b"".join(EVENTS)
        assert head.delivered == [None, None]


@pytest.mark.parametrize(
    ("header", "value", "stream", "status"),
    [
        ("x-resume-tokens", "3", True, 400),
        ("x-resume-tokens", "3", False, 400),
        ("x-resume-tokens", "0", True, 200),
        ("x-resume-tokens", "x", True, 400),
        ("last-event-id", "0", True, 400),
        ("last-event-id", "0", False, 200),
    ],
)
def test_the_rest_of_an_answer_is_refused_in_words(
    header: str, value: str, stream: bool, status: int
) -> None:
    head = forwarding(*parts(*EVENTS), END)
    answer = call(head, CHAT, look(stream=stream), headers={header: value})
    assert answer.status_code == status
    assert len(head.calls) == (status == 200)
    if value != "x" and status == 400:
        assert "without the header" in answer.json()["error"]["message"]


def test_an_aborted_answer_is_no_whole_one() -> None:
    aborted = Output(finish_reason=FinishReason.ABORT)
    answer = call(forwarding(part(b"{}", True), aborted), CHAT, look(stream=False))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")
    answer = call(forwarding(*parts(*EVENTS[:1]), aborted), CHAT, look())
    assert b"aborted this request" in answer.content


def test_a_call_that_has_ended_heads_is_refused_when_it_comes_again() -> None:
    """This includes calls of which no log is kept: forwarded calls, and embeddings that moonpool
    computes."""
    answers, raw = KeptAnswers(), json.dumps(look()).encode()
    embed = json.dumps({"input": "Hi"}).encode()
    head = forwarding(*parts(*EVENTS), END)
    head.card = structs.replace(head.card, embedding_size=4)
    for digest in (digest_of(f"forwarded {CHAT}", raw), digest_of("/v1/embeddings", embed)):
        answers.enders.note("", digest, MAX_ENDED, time.monotonic())
    with served(head, OFTEN, Keeper(), answers) as url:
        for path, content in ((CHAT, raw), ("/v1/embeddings", embed)):
            named = {"content-type": "application/json"}
            refused = httpx.post(url + path, content=content, headers=named, timeout=60)
            assert (refused.status_code, refused.json()["error"]["code"]) == (500, "head_failed")
        other = look() | {"max_tokens": 9}
        assert httpx.post(url + CHAT, json=other, timeout=60).status_code == 200
    assert len(head.calls) == 1


# Heads that end:


def speaking(silences: list[bool]) -> SometimesSilent:
    def script(_: Request) -> list[Step]:
        steps: list[Step] = []
        for number, step in enumerate([*parts(*EVENTS), END]):
            if silences[number % len(silences)]:
                steps.append(2.5 * PERIOD_S)
            steps.append(step)
        return steps

    head = SometimesSilent(script)
    head.is_silent = any(silences)
    made_to_forward(head)
    return head


@settings(max_examples=25, deadline=None, phases=NO_SHRINKING)
@given(st.lists(st.booleans(), min_size=1, max_size=4), shares, shares)
def test_the_next_head_sends_all_or_one_error(
    silences: list[bool], logged: float, sent: float
) -> None:
    """The head may end at any byte, even within comments."""
    shelf, first = Shelf(), speaking(silences)
    whole, base = respond(CHAT, first, shelf, look())
    cut, num_sent = cut_of(shelf, base, len(whole), logged, sent)
    second = speaking(silences)
    told = whole[:num_sent] + go_on(shelf.log()[:cut], whole[:num_sent], second)
    said = told.replace(comment(CHAT), b"")
    positions = [said.find(event) for event in EVENTS]
    num_said = sum(at >= 0 for at in positions)
    assert positions[:num_said] == sorted(positions[:num_said])
    assert all(said.count(event) == 1 for event in EVENTS[:num_said])
    assert said.count(b"HTTP/1.1 200") == 1 and told.endswith(b"0\r\n\r\n")
    if num_said < len(EVENTS) or b"head_replaced" in said:
        assert said.count(b"head_replaced") == 1
        assert not second.calls, "nobody can go on with it"
    if cut == len(shelf.log()):
        assert told == whole
    shelf.close()
