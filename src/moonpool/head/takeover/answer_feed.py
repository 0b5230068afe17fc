"""The head's side of its standby's copies of the answers under way."""

from __future__ import annotations

import asyncio
from typing import Protocol

from moonpool.api.connection.kept_answers import KeptAnswers
from moonpool.api.connection.kept_stream import KeptStream
from moonpool.log_limit import limited_logger
from moonpool.protocol.frames import AnswerBegun, AnswersCopied

log = limited_logger("moonpool.head")

COPY_S = 0.05
"""How many seconds the copies may be behind. The tokens that the copies lack are computed again."""
MAX_FRAME_BYTES = 1 << 20
MAX_UNSENT_BYTES = 4 << 20
"""No more is sent while the standby has this many bytes to read."""


class CopyChannel(Protocol):
    """The connection to the standby."""

    @property
    def num_unsent_bytes(self) -> int: ...

    def send(self, *frames: AnswersCopied) -> None: ...


class AnswerFeed:
    """Sends the logs of answers as they grow, until `end` is called."""

    def __init__(self, answers: KeptAnswers, channel: CopyChannel) -> None:
        self._answers = answers
        self._channel = channel
        # maps the number of an answer to the bytes of its log that were sent
        self._sent: dict[int, int] = {}
        self._changed: dict[int, KeptStream] = {}
        self._ended: list[int] = []
        self._is_first = True
        self._wake = asyncio.Event()
        self._wake.set()
        for kept in answers:
            self.changed(kept)
        answers.followers.append(self)
        self._task = asyncio.create_task(self._run())

    def end(self) -> None:
        self._answers.followers.remove(self)
        self._task.cancel()

    @property
    def has_begun(self) -> bool:
        """Whether the feed has begun; bytes sent earlier do not count."""
        return not self._is_first

    # Methods that `KeptAnswers` calls on a follower

    def changed(self, kept: KeptStream) -> None:
        self._changed[kept.number] = kept
        self._wake.set()

    def ended(self, number: int) -> None:
        self._changed.pop(number, None)
        if self._sent.pop(number, None) is not None:
            self._ended.append(number)
            self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(COPY_S)
            if self._channel.num_unsent_bytes > MAX_UNSENT_BYTES:
                continue
            try:
                self.send()
            except Exception:
                log.exception("the standby has no copies of the answers under way")
                return

    def send(self) -> None:
        """Sends the new bytes, at most one frame."""
        begun: list[AnswerBegun] = []
        grown: list[tuple[int, bytes]] = []
        room = MAX_FRAME_BYTES
        for number, kept in list(self._changed.items()):
            if room <= 0:
                break
            offset = self._sent.get(number)
            if offset is None:
                begun.append(_begun(kept))
                offset = kept.log.num_first_bytes
            data = kept.log.read_from(offset, room)
            if data:
                grown.append((number, data))
                room -= len(data)
            self._sent[number] = offset + len(data)
            if room > 0:
                del self._changed[number]
        ended, self._ended = self._ended, []
        frame = AnswersCopied(
            begun=tuple(begun), grown=tuple(grown), ended=tuple(ended), is_first=self._is_first
        )
        self._is_first = False
        if not self._changed:
            self._wake.clear()
        self._channel.send(frame)


def _begun(kept: KeptStream) -> AnswerBegun:
    opening, facts = kept.opening, kept.opening.facts
    return AnswerBegun(
        number=kept.number,
        tenant=opening.tenant,
        request_id=facts.request_id,
        digest=opening.digest,
        seed=facts.seed,
        created_s=facts.created_s,
        ids=facts.ids,
        max_model_tokens=facts.max_model_tokens,
        num_returns=opening.num_returns,
    )
