"""Tests that the bytes of a response are counted, however the response is cut into pieces."""

from __future__ import annotations

import json
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from moonpool.epp.exchange import MAX_REST_BYTES, ResponseWatch


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


CHAT = (
    event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    + b"".join(event(choices=[{"index": 0, "delta": {"content": word}}]) for word in "abcd")
    + b": a comment\n\n"
    + event(choices=[], usage={"completion_tokens": 4})
    + b"data: [DONE]\n\n"
)
COMPLETION = b"".join(event(choices=[{"text": w}]) for w in "xyz") + b"data: [DONE]\n\n"
RESPONSES = (
    b"event: response.created\n"
    + event(type="response.created")
    + b"".join(
        b"event: response.output_text.delta\n" + event(type="response.output_text.delta", delta=w)
        for w in "ab"
    )
    + b"event: response.completed\n"
    + event(type="response.completed")
)
MESSAGES = (
    b"event: message_start\n"
    + event(type="message_start")
    + b"event: content_block_delta\n"
    + event(type="content_block_delta", delta={"text": "q"})
    + b"event: message_stop\n"
    + event(type="message_stop")
)


@given(st.sampled_from([(CHAT, 4), (COMPLETION, 3), (RESPONSES, 2), (MESSAGES, 1)]), st.data())
def test_pieces_do_not_matter(case: tuple[bytes, int], data: st.DataObject) -> None:
    whole, expected = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    watch = ResponseWatch(is_stream=True)
    number = 0
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        number += watch.feed(whole[start:end])
    number += watch.end()
    assert (number, watch.num_tokens, watch.is_done) == (expected, expected, True)


def test_an_answer_may_quote_the_last_event() -> None:
    watch = ResponseWatch(is_stream=True)
    quoted = event(choices=[{"index": 0, "delta": {"content": "ends with [DONE]"}}])
    assert watch.feed(quoted) == 1 and not watch.is_done
    assert watch.feed(b"data: [DONE]\n\n") == 0 and watch.is_done


def test_a_stream_that_is_cut_is_not_done() -> None:
    watch = ResponseWatch(is_stream=True)
    watch.feed(CHAT[: len(CHAT) // 2])
    watch.end()
    assert not watch.is_done


def test_a_whole_response_says_what_it_used() -> None:
    body = json.dumps(
        {
            "choices": [{"text": "x" * 100_000}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 7},
        }
    ).encode()
    watch = ResponseWatch(is_stream=False)
    assert sum(watch.feed(body[i : i + 999]) for i in range(0, len(body), 999)) == 0
    assert (watch.end(), watch.is_done) == (7, True)
    empty = ResponseWatch(is_stream=False)
    empty.feed(b"{}")
    assert empty.end() == 1


def test_an_event_without_an_end_takes_no_memory() -> None:
    watch, piece = ResponseWatch(is_stream=True), b"x" * 65_536
    tracemalloc.start()
    try:
        for _ in range(3 * MAX_REST_BYTES // len(piece)):
            watch.feed(piece)
            assert tracemalloc.get_traced_memory()[0] < 2 * MAX_REST_BYTES
    finally:
        tracemalloc.stop()
    assert watch.feed(b"\n" + COMPLETION) == 3
