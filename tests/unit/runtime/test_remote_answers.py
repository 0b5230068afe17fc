"""Tests an answer at a front: its tokens come from instances directly and from the head, in any
order."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from moonpool.head.fronts.messages import AnswerPart, BeginAnswer, ToldRefusal
from moonpool.head.fronts.remote_answer import RemoteAnswer
from moonpool.types import FinishReason, Request, RequestId, SamplingParams, Slo, Token


def begun(delivered: tuple[int, ...] | None = None) -> RemoteAnswer:
    request = Request(
        request_id=RequestId("r"),
        token_ids=[1, 2],
        sampling=SamplingParams(),
        slo=Slo(ttft_s=1.0, tbt_s=1.0),
        arrived_s=0.0,
        deadline_s=9.0,
    )
    return RemoteAnswer(BeginAnswer(7, "m", request, delivered))


def tokens(*ids: int) -> tuple[Token, ...]:
    return tuple(Token(each) for each in ids)


def read(answer: RemoteAnswer) -> tuple[list[int], FinishReason | None]:
    """Returns the tokens that have arrived."""
    output = asyncio.run(asyncio.wait_for(answer.next_output(), 5))
    return [token.token_id for token in output.tokens], output.finish_reason


@given(st.data())
def test_parts_in_any_order_and_twice_make_the_same_answer(data: st.DataObject) -> None:
    """The attempts have equal tokens, and a later attempt may send each part again."""
    whole = list(range(100, 100 + data.draw(st.integers(2, 30))))
    before = data.draw(st.integers(0, 5))
    delivered = tuple(range(before)) if before else None
    ids = [*range(before), *whole]
    parts = []
    position = before
    while position < len(ids):
        size = data.draw(st.integers(1, 4))
        parts.append((position, ids[position : position + size]))
        position += size
    last = parts.pop()
    again = data.draw(st.lists(st.sampled_from(parts), max_size=5)) if parts else []
    order = data.draw(st.permutations([*parts, *again]))
    answer = begun(delivered)
    is_last_sent = data.draw(st.booleans())
    end = AnswerPart(7, last[0], tokens(*last[1]), FinishReason.LENGTH, 3, {"decode": 1.0})
    if is_last_sent:
        answer.grow(end)
    for at, some in order:
        if data.draw(st.booleans()):
            answer.grow_directly(1, at, tokens(*some))
        else:
            answer.grow(AnswerPart(7, at, tokens(*some)))
    if not is_last_sent:
        answer.grow(end)
    assert not answer.is_wrong
    assert answer.lacks_since_s is None
    assert answer.is_complete
    assert answer.timings_s == {"decode": 1.0}
    assert read(answer) == (whole, FinishReason.LENGTH)


def test_an_attempt_that_goes_on_from_other_tokens_begins_the_answer_again() -> None:
    answer = begun()
    answer.grow_directly(1, 0, tokens(5, 6, 7))
    answer.grow_directly(2, 2, tokens(7))
    assert not answer.is_wrong, "the next attempt drew the same"
    answer.grow_directly(2, 3, tokens(8))
    answer.grow_directly(1, 4, tokens(99))
    assert read(answer)[0] == [5, 6, 7, 8], "the attempt before is over"
    answer.grow_directly(3, 3, tokens(9))
    assert answer.is_wrong
    answer.grow_directly(3, 4, tokens(10))
    again = answer.begin_again(8)
    assert (again.number, again.delivered) == (8, (5, 6, 7, 8))
    assert not answer.is_wrong
    answer.grow_directly(1, 4, tokens(11))
    assert read(answer)[0] == [11]


def test_an_end_before_what_the_client_has_is_wrong() -> None:
    answer = begun()
    answer.grow_directly(1, 0, tokens(5, 6, 7))
    answer.grow(AnswerPart(7, 1, tokens(6), FinishReason.STOP))
    assert answer.is_wrong
    assert not answer.is_complete


def test_lost_tokens_are_missed() -> None:
    answer = begun((1, 2))
    answer.grow_directly(1, 3, tokens(4))
    assert answer.lacks_since_s is not None
    answer.grow(AnswerPart(7, 2, tokens(3)))
    assert answer.lacks_since_s is None
    assert read(answer)[0] == [3, 4]


def test_a_refusal_comes_after_the_tokens_before_it() -> None:
    answer = begun()
    answer.grow_directly(1, 0, tokens(5))
    answer.refuse(ToldRefusal(503, "gone", "it is gone"))
    assert read(answer) == ([5], None)
    assert answer.is_complete
