"""The answers of one front as they come: from instances directly, and from the head.

Each part's position tells its place in the answer. The front's state is authoritative: if an
attempt continues after other tokens, or tokens are lost, the answer must begin again after the
tokens that the front has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from moonpool.api.serving_backend import Output, RequestRefused
from moonpool.head.fronts.messages import AnswerPart, BeginAnswer, ToldRefusal
from moonpool.types import Token

MAX_AHEAD = 4096
"""Most parts of an answer that wait for tokens before them. If there are more, the answer begins
again."""


class RemoteAnswer:
    """The outputs of one request. A slow reader gets several outputs joined in one."""

    def __init__(self, begin: BeginAnswer) -> None:
        self.begin = begin
        self.stage = ""
        self.num_lost = 0
        """Number of heads that were lost in a row without a token of this answer."""
        self.timings_s: dict[str, float] | None = None
        self.lacks_since_s: float | None = None
        """Time since which tokens are missing before others that are here."""
        self.is_wrong = False
        """Whether the answer continues after tokens that differ from those the client has."""
        self._token_ids = list(begin.delivered or ())
        self._tokens: list[Token] = []
        self._attempt = 0
        self._ahead: list[AnswerPart] = []
        self._last: AnswerPart | None = None
        self._refused: ToldRefusal | None = None
        self._wakeup = asyncio.Event()

    @property
    def number(self) -> int:
        return self.begin.number

    def grow_directly(self, attempt: int, position: int, tokens: Sequence[Token]) -> None:
        """Adds tokens that an instance sent directly. Tokens of attempts before the newest known
        one are ignored."""
        if attempt < self._attempt or self.is_complete:
            return
        self._attempt = attempt
        if position == len(self._token_ids) and not self._ahead and not self.is_wrong:
            self._add(tokens)
            self._wakeup.set()
            return
        self.grow(AnswerPart(self.number, position, tuple(tokens)))

    def grow(self, part: AnswerPart) -> None:
        """Adds tokens that came from the head, in any order relative to those of instances."""
        if self.is_wrong or self.is_complete:
            return
        self._ahead.append(part)
        if len(self._ahead) > 1:
            self._ahead.sort(key=lambda each: each.position)
        while self._ahead and self._ahead[0].position <= len(self._token_ids):
            self._take(self._ahead.pop(0))
        if not self._ahead:
            self.lacks_since_s = None
        elif self.lacks_since_s is None:
            self.lacks_since_s = time.monotonic()
        self.is_wrong = self.is_wrong or len(self._ahead) > MAX_AHEAD

    def refuse(self, refusal: ToldRefusal) -> None:
        self._refused = refusal
        self._wakeup.set()

    @property
    def is_complete(self) -> bool:
        has_finish = self._last is not None and self._last.finish is not None
        return has_finish or self._refused is not None

    def begin_again(self, number: int) -> BeginAnswer:
        """Returns the request to send to this head, or to the next one. The request counts the
        tokens that its client has, even if there are none, because it was admitted."""
        self._ahead.clear()
        self._attempt, self.is_wrong, self.lacks_since_s = 0, False, None
        self.begin = msgspec.structs.replace(
            self.begin, number=number, delivered=tuple(self._token_ids)
        )
        return self.begin

    @property
    def has_begun(self) -> bool:
        """Whether the client has tokens of this request."""
        return self._last is not None or bool(self._token_ids)

    async def next_output(self) -> Output:
        """Raises RequestRefused."""
        await self._wakeup.wait()
        self._wakeup.clear()
        if self._refused is not None and not self._tokens:
            raise RequestRefused.of(self._refused, self._refused.is_counted)
        if self._refused is not None:
            self._wakeup.set()  # wakes the reader, so that earlier tokens are sent first
        tokens, self._tokens = tuple(self._tokens), []
        last = self._last
        if last is None:
            return Output(tokens)
        return Output(tokens, last.finish, last.cached_tokens, last.timings_s)

    def _take(self, part: AnswerPart) -> None:
        """Takes a part that begins at the end of the known tokens, or before it."""
        known = self._token_ids[part.position :]
        new = [token.token_id for token in part.tokens[: len(known)]]
        if known[: len(new)] != new or (part.finish is not None and len(known) > len(new)):
            self.is_wrong = True
            return
        self._last = part
        self.timings_s = part.timings_s or self.timings_s
        self._add(part.tokens[len(known) :])
        if part.tokens[len(known) :] or part.finish is not None:
            self._wakeup.set()

    def _add(self, tokens: Sequence[Token]) -> None:
        self.stage, self.num_lost = "decode", 0
        self._tokens += tokens
        self._token_ids += [token.token_id for token in tokens]
