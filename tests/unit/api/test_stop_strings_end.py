"""Tests that a stop string ends an answer, and that the head learns of this end like of any
other."""

from __future__ import annotations

import pytest
from scripted_head import ScriptedHead, call, chat, complete, one_by_one, spoken

from moonpool.api.serving_backend import Output, RequestRefused
from moonpool.types import FinishReason, Request, Token


def test_a_stop_string_inside_one_output_drops_the_tokens_after_it() -> None:
    head = ScriptedHead(lambda _: spoken("abcdef"))
    response = complete(head, stop="c")
    answer = response.json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["usage"]["completion_tokens"] == 3
    assert [found[1:] for found in head.finished] == [(FinishReason.STOP, 3)]
    assert response.headers["x-moonpool-timing"] == "decode=0.500000"


def test_a_stop_string_in_the_last_output_decides_the_reason() -> None:
    """A stop string must count although the engine ended the answer at its limit with the same
    token."""
    last = Output(tokens=(Token(ord("c")),), finish_reason=FinishReason.LENGTH)
    head = ScriptedHead(lambda _: [*spoken("ab", finish=None), last])
    answer = complete(head, stop="c").json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert [found[1:] for found in head.finished] == [(FinishReason.STOP, 3)]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_api_tells_the_head_of_a_stop_string(path: str, stream: bool) -> None:
    head = ScriptedHead(lambda _: one_by_one(b"Hello world"))
    name = "stop_sequences" if path == "/v1/messages" else "stop"
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "stream": stream}
    assert call(head, path, {"model": "fake", **body, name: ["lo"]}).status_code == 200
    assert [found[1:] for found in head.finished] == [(FinishReason.STOP, 5)]
    assert head.aborted == []


def test_a_choice_that_stops_is_finished_although_another_one_fails() -> None:
    def script(request: Request) -> list[object]:
        if request.request_id.endswith("~1"):
            return [0.05, RequestRefused(503, "lost", "instance lost")]
        return [*spoken("a", "b", finish=None), 60.0]

    head = ScriptedHead(script)  # type: ignore[arg-type]
    assert chat(head, n=2, stop="b").status_code == 503
    assert [found[1:] for found in head.finished] == [(FinishReason.STOP, 2)]
    assert head.aborted == []
