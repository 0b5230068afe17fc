"""Tests a standby's copies of answers: the next head continues each answer after the last tokens
that the head sent."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_keeper import LogKeeper

from moonpool.api.connection.call_log import CallLog
from moonpool.api.connection.kept_answers import KeptAnswers
from moonpool.api.connection.kept_stream import KeptStream, Opening, draw_facts
from moonpool.api.serving_backend import Output
from moonpool.head.takeover import answer_copies, answer_feed
from moonpool.head.takeover.answer_copies import AnswerCopies
from moonpool.head.takeover.answer_feed import AnswerFeed
from moonpool.protocol.frames import AnswersCopied, DownFrame
from moonpool.types import FinishReason, Token

_DECODER = msgspec.msgpack.Decoder(DownFrame)


class Wire:
    """The channel to a standby, which may be slow."""

    def __init__(self, copies: AnswerCopies) -> None:
        self.copies = copies
        self.num_unsent_bytes = 0
        self.frames: list[AnswersCopied] = []
        self.now = 0.0

    def send(self, *frames: AnswersCopied) -> None:
        for frame in frames:
            self.frames.append(frame)
            found = _DECODER.decode(msgspec.msgpack.encode(frame))
            assert isinstance(found, AnswersCopied)
            self.copies.take(found, self.now)


def opened(keeper: LogKeeper, name: str, tenant: str = "t") -> KeptStream:
    opening = Opening(
        request=b"POST / HTTP/1.1\r\nauthorization: Bearer secret\r\n\r\n",
        default_headers=(),
        base=7,
        arrived_s=1.0,
        tenant=tenant,
        is_operator=True,
        facts=draw_facts(name, 100),
        digest=name.encode() * 3,
    )
    kept = KeptStream.begin(keeper, None, opening)
    assert kept is not None
    return kept


def said(*tokens: int, ends: bool = False) -> Output:
    return Output(tuple(map(Token, tokens)), FinishReason.LENGTH if ends else None)


def adopted(copies: AnswerCopies) -> dict[str, KeptStream]:
    """Returns the answers that the next head reads, by request id."""
    keeper, found = LogKeeper(), {}
    for number, fd in enumerate(copies.leave()):
        log = CallLog(keeper, number, fd)
        log.read()
        kept = KeptStream.take_cut(log)
        found[kept.opening.facts.request_id] = kept
    return found


def tokens_of(kept: KeptStream) -> list[int]:
    return [token.token_id for entry in kept.read_deliveries() for token in entry.tokens]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, 3), st.lists(st.integers(0, 1 << 17), max_size=9)),
        st.tuples(st.just("copy"), st.just(0), st.just([])),
        st.tuples(st.just("join"), st.just(0), st.just([])),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(steps, st.integers(1, 200))
def test_copies_are_the_answers_as_they_were_when_copied_last(
    steps: list[tuple[str, int, list[int]]], frame_bytes: int
) -> None:
    """Frames have few bytes, so that records come in pieces, of which the last may be missing."""

    async def run(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(answer_feed, "MAX_FRAME_BYTES", frame_bytes)
        answers, keeper = KeptAnswers(), LogKeeper()
        wire = Wire(AnswerCopies())
        feed: AnswerFeed | None = None
        kept: dict[int, KeptStream] = {}
        known: dict[int, list[int]] = {}
        for kind, index, tokens in steps:
            if kind == "say":
                if index not in kept:
                    kept[index] = opened(keeper, f"r{index}")
                    answers.begin(kept[index], lambda: None)
                kept[index].note(0, said(*tokens))
                known.setdefault(index, []).extend(tokens)
            elif kind == "copy" and feed is not None:
                feed.send()
            elif kind == "join":
                if feed is not None:
                    feed.end()
                feed = AnswerFeed(answers, wire)
        found = adopted(wire.copies)
        for name, copy in found.items():
            whole = known[int(name[1:])]
            assert tokens_of(copy) == whole[: len(tokens_of(copy))]
        if feed is not None:
            for _ in range(2000):
                feed.send()
            found = adopted(wire.copies)
            assert {name: tokens_of(copy) for name, copy in found.items()} == {
                f"r{index}": whole for index, whole in known.items()
            }
            for name, copy in found.items():
                own = kept[int(name[1:])].opening
                assert copy.opening.facts == own.facts
                assert (copy.opening.tenant, copy.opening.digest) == (own.tenant, own.digest)
                assert not copy.opening.is_operator
                copy.drop()
            feed.end()
        for one in kept.values():
            one.drop()

    with pytest.MonkeyPatch.context() as patch:
        asyncio.run(run(patch))


def test_what_clients_sent_stays_at_the_head() -> None:
    async def run() -> None:
        answers, keeper = KeptAnswers(), LogKeeper()
        wire = Wire(AnswerCopies())
        feed = AnswerFeed(answers, wire)
        kept = opened(keeper, "a")
        answers.begin(kept, lambda: None)
        kept.note(0, said(1, 2))
        await asyncio.sleep(10 * answer_feed.COPY_S)
        assert b"secret" not in msgspec.msgpack.encode(wire.frames)
        assert tokens_of(adopted(wire.copies)["a"]) == [1, 2]
        feed.end()
        kept.drop()

    asyncio.run(run())


def test_a_standby_that_does_not_read_gets_the_newest_state_later() -> None:
    async def run() -> None:
        answers, keeper = KeptAnswers(), LogKeeper()
        wire = Wire(AnswerCopies())
        feed = AnswerFeed(answers, wire)
        kept = opened(keeper, "a")
        answers.begin(kept, lambda: None)
        wire.num_unsent_bytes = answer_feed.MAX_UNSENT_BYTES + 1
        for token in range(50):
            kept.note(0, said(token))
            await asyncio.sleep(answer_feed.COPY_S / 20)
        assert not wire.frames
        wire.num_unsent_bytes = 0
        while not wire.frames:
            await asyncio.sleep(0.01)
        assert len(wire.frames) == 1
        assert tokens_of(adopted(wire.copies)["a"]) == list(range(50))
        feed.end()
        kept.drop()

    asyncio.run(run())


def test_complete_answers_stay_for_a_moment_and_copies_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        answers, keeper = KeptAnswers(), LogKeeper()
        wire = Wire(AnswerCopies())
        feed = AnswerFeed(answers, wire)
        for number in range(6):
            kept = opened(keeper, f"r{number}")
            answers.begin(kept, lambda: None)
            kept.note(0, said(*range(50), ends=True))
            feed.send()
            answers.drop(kept)
        feed.send()
        assert len(wire.copies) == 4
        assert sorted(adopted(wire.copies)) == ["r2", "r3", "r4", "r5"]
        monkeypatch.setattr(answer_copies, "MAX_COPIED_BYTES", 0)
        wire.copies.take(AnswersCopied(), 1.0)
        assert len(wire.copies) == 0
        monkeypatch.setattr(answer_copies, "MAX_COPIED_BYTES", 1 << 20)
        late = opened(keeper, "late")
        answers.begin(late, lambda: None)
        late.note(0, said(1))
        feed.send()
        answers.drop(late)
        feed.send()
        wire.now += answer_copies.ENDED_S
        wire.copies.take(AnswersCopied(), wire.now)
        assert len(wire.copies) == 1
        wire.copies.take(AnswersCopied(), wire.now + 0.1)
        assert len(wire.copies) == 0
        feed.end()

    monkeypatch.setattr(answer_copies, "MAX_COPIES", 4)
    asyncio.run(run())


def test_a_full_memory_of_the_standby_costs_the_copy_and_not_the_takeover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> AnswerCopies:
        answers, keeper = KeptAnswers(), LogKeeper()
        wire = Wire(AnswerCopies())
        feed = AnswerFeed(answers, wire)
        kept = opened(keeper, "a")
        answers.begin(kept, lambda: None)
        kept.note(0, said(1))
        feed.send()
        feed.end()
        kept.drop()
        return wire.copies

    copies = asyncio.run(run())

    def full(*_: Any) -> int:
        raise OSError("no memory")

    monkeypatch.setattr(os, "write", full)
    assert copies.leave() == ()
