"""Tests a client that continues with the id of its last event, at a head that does not know the
answer."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_head import ScriptedHead, Step, call, served, spoken, wait_until

from moonpool.api.errors import ApiError
from moonpool.api.resume.event_ids import HEADER, last_event_id
from moonpool.api.serving_backend import Output
from moonpool.types import FinishReason, Request, Token, TokenLogprobs

TEXT = "Grüße an alle, die warten. <stop> never said"
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 100, "echo": True}),
    ("/v1/completions", {"prompt": "Hi", "logprobs": 2, "stop": ["<stop>"]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}),
    ("/v1/responses", {"input": "Hi"}),
]


def grouped(*sizes: int, text: str = TEXT) -> list[Step]:
    """Returns the text as tokens, this many at a time."""
    tokens = [
        Token(byte, TokenLogprobs(-0.5, ((byte, -0.5), (32, -1.5)))) for byte in text.encode()
    ]
    steps: list[Step] = []
    while tokens:
        size = sizes[len(steps) % len(sizes)]
        taken, tokens = tokens[:size], tokens[size:]
        steps.append(Output(tuple(taken), None if tokens else FinishReason.LENGTH))
    return steps


def stream(
    head: ScriptedHead, path: str, body: dict[str, Any], last: str = "0"
) -> list[tuple[str, str]]:
    """Returns the events of a stream, each with its id."""
    answer = call(head, path, body | {"stream": True}, headers={HEADER: last})
    assert answer.status_code == 200, answer.text
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        first, _, event = block.partition("\n")
        assert first.startswith("id: ")
        found.append((first.removeprefix("id: "), event))
    return found


@pytest.mark.long
def test_an_answer_goes_on_from_any_event_at_another_head() -> None:
    for path, body in CALLS:
        whole = stream(ScriptedHead(lambda _: grouped(3, 1, 5)), path, body)
        assert len(whole) > 20
        for number, (last, _) in enumerate(whole[:-1]):
            # The tokens arrive in other groups than before. Values that were drawn for the response
            # must not be drawn again.
            other = ScriptedHead(lambda _, number=number: grouped(1 + number % 7))
            assert stream(other, path, body, last) == whole[number + 1 :], (path, number)


def test_the_events_are_those_of_a_call_without_ids_token_by_token() -> None:
    for path, body in CALLS:
        head = ScriptedHead(lambda _: grouped(1))
        plain = call(head, path, body | {"stream": True}, headers={"X-Request-Id": "same"}).text
        assert "id: " not in plain.replace('"id: ', "")
        texts = [_without_drawn(block) for block in plain.split("\n\n")[:-1]]
        assert [_without_drawn(event) for _, event in stream(head, path, body)] == texts


def _without_drawn(event: str) -> Any:
    data = event.rpartition("data: ")[2]
    if data == "[DONE]":
        return data

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            drawn = ("id", "item_id", "created", "created_at")
            return {name: strip(inner) for name, inner in value.items() if name not in drawn}
        return [strip(inner) for inner in value] if isinstance(value, list) else value

    return strip(json.loads(data))


def test_what_was_drawn_without_a_seed_is_drawn_no_more() -> None:
    body = {"prompt": "Hi", "temperature": 1}
    first, second = ScriptedHead(lambda _: grouped(1)), ScriptedHead(lambda _: grouped(1))
    whole = stream(first, "/v1/completions", body)
    stream(second, "/v1/completions", body, whole[9][0])
    assert second.requests[0].sampling.seed == first.requests[0].sampling.seed
    assert second.requests[0].sampling == first.requests[0].sampling


def test_each_of_several_choices_goes_on_where_it_was() -> None:
    body = {"prompt": "Hi", "n": 3, "seed": 5}

    def script(request: Request) -> list[Step]:
        text = f"{TEXT} {request.sampling.seed}"
        return grouped(1 + (request.sampling.seed or 0) % 3, text=text)

    whole = stream(ScriptedHead(script), "/v1/completions", body)
    for number in range(0, len(whole) - 1, 7):
        rest = stream(ScriptedHead(script), "/v1/completions", body, whole[number][0])
        for index in range(3):
            of_choice = f'"index":{index}'
            assert [event for _, event in rest if of_choice in event] == [
                event for _, event in whole[number + 1 :] if of_choice in event
            ]
        assert rest[-1][1] == "data: [DONE]"


@pytest.mark.parametrize("text", [TEXT.replace("alle", "alte"), TEXT[:12]])
def test_an_answer_that_differs_is_an_error_and_no_continuation(text: str) -> None:
    body: dict[str, Any] = {"prompt": "Hi", "stream": True}
    last = stream(ScriptedHead(lambda _: grouped(2)), "/v1/completions", body)[20][0]
    other = ScriptedHead(lambda _: grouped(2, text=text))
    answer = call(other, "/v1/completions", body, headers={HEADER: last})
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "answer_differs"


def test_an_id_is_good_for_its_own_request_only() -> None:
    body: dict[str, Any] = {"prompt": "Hi", "stream": True}
    head = ScriptedHead(lambda _: grouped(2))
    last = stream(head, "/v1/completions", body)[20][0]
    others: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", body | {"prompt": "Ho"}),
        ("/v1/completions", body | {"temperature": 0.5}),
        ("/v1/completions", body | {"stop": "x"}),
        ("/v1/completions", body | {"n": 2}),
        ("/v1/responses", {"input": "Hi", "stream": True}),
    ]
    for path, other in others:
        answer = call(head, path, other, headers={HEADER: last})
        assert answer.status_code == 409, other
        assert answer.json()["error"]["code"] == "another_request"
    assert len(head.requests) == 1


def test_an_error_has_no_id_so_that_its_client_may_try_again() -> None:
    steps = [*grouped(1)[:5], RuntimeError("broken")]
    answer = call(
        ScriptedHead(lambda _: steps),
        "/v1/completions",
        {"prompt": "Hi", "stream": True},
        headers={HEADER: "0"},
    )
    blocks = answer.text.split("\n\n")[:-1]
    assert [block.startswith("id: ") for block in blocks] == [True] * (len(blocks) - 1) + [False]
    assert "internal_error" in blocks[-1]


def test_the_id_of_a_response_stays_while_its_first_call_still_runs() -> None:
    body = {"prompt": "Hi", "stream": True}
    slow: list[Step] = [*grouped(1)[:20], 60.0, *grouped(1)[20:]]
    head = ScriptedHead(lambda request: slow if not head.requests[1:] else grouped(1))
    lines: list[str] = []

    def read(url: str) -> None:
        headers = {HEADER: "0", "X-Request-Id": "mine"}
        with (
            suppress(httpx.HTTPError),
            httpx.stream("POST", url, json=body, headers=headers) as answer,
        ):
            for line in answer.iter_lines():
                lines.append(line)

    with served(head) as base:
        url = f"{base}/v1/completions"
        thread = threading.Thread(target=read, args=(url,), daemon=True)
        thread.start()
        assert wait_until(lambda: sum(line.startswith("data") for line in lines) >= 18)
        last = [line for line in lines if line.startswith("id: ")][-1].removeprefix("id: ")
        rest = httpx.post(url, json=body, headers={HEADER: last}, timeout=60)
        assert rest.headers["x-request-id"] == "mine"
        assert json.loads(rest.text.split("data: ")[1].split("\n")[0])["id"] == "cmpl-mine"
        assert rest.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("value", ["1", "x", "a/b/c", "//", "é", "9" * 9000, "AQ/r/1+x"])
def test_what_is_no_id_is_refused_in_one_line(value: str) -> None:
    with pytest.raises(ApiError) as caught:
        last_event_id({b"last-event-id": value.encode()})
    assert caught.value.status == 400
    assert "\n" not in caught.value.message


@given(st.binary(max_size=200), st.integers(0, 150), st.integers(0, 255))
def test_no_header_raises_another_error(raw: bytes, at: int, byte: int) -> None:
    head = ScriptedHead(lambda _: spoken("Hello"))
    good = stream(head, "/v1/completions", {"prompt": "Hi"})[0][0].encode()
    changed = good[:at] + bytes([byte]) + good[at + 1 :]
    for value in (raw, changed):
        with suppress(ApiError):
            last_event_id({b"last-event-id": value})
