"""The answers of one front, for clients that may come back over any front."""

from __future__ import annotations

import asyncio

import msgspec

from moonpool.api.connection.kept_answers import KeptAnswers, Known
from moonpool.api.connection.kept_stream import KeptStream
from moonpool.head.fronts.messages import (
    AnswerFetched,
    AnswerName,
    CopyAnswers,
    FetchAnswer,
    ForgetAnswer,
    HoldAnswer,
)
from moonpool.head.fronts.remote_head import RemoteHead
from moonpool.head.takeover.answer_feed import AnswerFeed
from moonpool.log_limit import limited_logger
from moonpool.protocol.frames import AnswersCopied

log = limited_logger("moonpool.front")

_KNOWN = msgspec.msgpack.Decoder(Known)


class FrontAnswers(KeptAnswers):
    """Like `KeptAnswers`. Holds the answers of a front; an answer that another front holds moves
    here when its client comes back here."""

    def __init__(self, head: RemoteHead) -> None:
        super().__init__()
        self._head = head
        self._elsewhere: set[AnswerName] = set()
        self._gives: set[asyncio.Task[None]] = set()
        self._feed: AnswerFeed | None = None
        head.kept = self

    async def find(
        self, tenant: str, request_id: str, digest: bytes, displaces: bool
    ) -> Known | None:
        found = await super().find(tenant, request_id, digest, displaces)
        name = AnswerName(tenant, request_id, digest)
        if found is not None or not (displaces or name in self._elsewhere):
            return found
        fetched = await self._head.fetch(lambda number: FetchAnswer(number, name, displaces))
        return _KNOWN.decode(fetched.known) if fetched.known else None

    def hold(self, kept: KeptStream) -> None:
        super().hold(kept)
        if kept.number in self.cut:
            self._head.send(HoldAnswer(name_of(kept)))

    def forget(self, number: int) -> None:
        kept = self.cut.get(number)
        super().forget(number)
        if kept is not None:
            self._head.send(ForgetAnswer(name_of(kept)))

    # Other fronts

    def forget_others(self) -> None:
        self._elsewhere.clear()
        self.copy(False)  # the next head will tell whether a standby follows

    def copy(self, is_wanted: bool) -> None:
        if is_wanted and self._feed is None:
            self._feed = AnswerFeed(self, _CopyChannel(self._head))
        elif not is_wanted and self._feed is not None:
            self._feed.end()
            self._feed = None

    def tell_all(self) -> None:
        for kept in self.cut.values():
            self._head.send(HoldAnswer(name_of(kept)))

    def on_message(self, message: HoldAnswer | ForgetAnswer | FetchAnswer) -> None:
        match message:
            case HoldAnswer():
                self._elsewhere.add(message.name)
            case ForgetAnswer():
                self._elsewhere.discard(message.name)
            case FetchAnswer():
                give = asyncio.create_task(self._give(message))
                self._gives.add(give)
                give.add_done_callback(self._gives.discard)

    async def _give(self, fetch: FetchAnswer) -> None:
        """Gives an answer to the front at which its client has come back; that front continues from
        what this front knows."""
        name, known = fetch.name, b""
        found = await super().find(name.tenant, name.request_id, name.digest, fetch.displaces)
        if found is not None:
            known = msgspec.msgpack.encode(found)
            for number in [n for n, kept in self.cut.items() if name_of(kept) == name]:
                self.forget(number)
        self._head.send(AnswerFetched(fetch.number, known))


class _CopyChannel:
    """Sends copies of answers to a standby by way of the head."""

    def __init__(self, head: RemoteHead) -> None:
        self._head = head

    @property
    def num_unsent_bytes(self) -> int:
        return self._head.num_unsent_bytes

    def send(self, *frames: AnswersCopied) -> None:
        for frame in frames:
            self._head.send(CopyAnswers(frame))


def name_of(kept: KeptStream) -> AnswerName:
    opening = kept.opening
    return AnswerName(opening.tenant, opening.facts.request_id, opening.digest)
