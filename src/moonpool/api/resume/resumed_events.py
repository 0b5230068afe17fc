"""Events of a stream from a number of tokens on, for a client that has the tokens before.

A client whose connection broke sends the same call with the same `X-Request-Id`, and the number of
tokens that it has in `X-Resume-Tokens`. What the server knows of the answer is not computed again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from moonpool.api.choice import Choice, Delta
from moonpool.api.errors import ApiError
from moonpool.api.serving_backend import RequestRefused
from moonpool.api.shapes import EventWriter

HEADER = "X-Resume-Tokens"
INSTEAD = "Last-Event-ID instead of X-Resume-Tokens"
_COUNTS = re.compile(rb"\d{1,9}(,\d{1,9}){0,255}")


def resume_tokens(headers: dict[bytes, bytes]) -> tuple[int, ...] | None:
    """Returns how many tokens the client has of each choice, or None if it does not say. Raises
    ApiError."""
    raw = headers.get(HEADER.lower().encode())
    if raw is None:
        return None
    raw = raw.replace(b" ", b"")
    if not _COUNTS.fullmatch(raw):
        text = f"The header {HEADER} must be the number of tokens that you have; of several"
        raise ApiError(
            f"{text} choices, the numbers with commas.", param=HEADER, code="invalid_header"
        )
    return tuple(int(count) for count in raw.split(b","))


def check_resumption(
    has: Sequence[int], choices: Sequence[Choice], is_streamed: bool, seed_is_unknown: bool
) -> None:
    """Raises ApiError if the rest of the answer cannot be sent. `seed_is_unknown`: the seed of the
    answer that the client has is unknown."""
    if len(has) != len(choices):
        text = f"The header {HEADER} has {len(has)} numbers, the call has {len(choices)} choices."
        raise ApiError(text, param=HEADER, code="invalid_header")
    if not any(has):
        return
    if not is_streamed:
        text = f"The header {HEADER} is for streams. Without it, the whole answer is sent again."
        raise ApiError(text, param=HEADER, code="invalid_header")
    if any(choice.has_tools for choice in choices):
        text = f"A number of tokens does not tell which tool calls arrived. Use {INSTEAD}."
        raise ApiError(text, param=HEADER, code="invalid_header")
    if seed_is_unknown and any(choice.request.sampling.temperature > 0 for choice in choices):
        text = (
            "This server knows no answer to the same request with this X-Request-Id. It was drawn"
            f" without a seed, so it cannot be computed again. Send the request without {HEADER}."
        )
        raise ApiError(text, status=409, param="X-Request-Id", code="answer_unknown")


class ResumedEvents:
    """Leaves out the events of tokens that the client has.

    Each choice must receive its tokens one by one.
    """

    def __init__(self, writer: EventWriter, has: Sequence[int]) -> None:
        """`has`: tokens of each choice."""
        self._writer = writer
        self._has = tuple(has)
        self._has_begun = not any(has)

    @property
    def catches_up(self) -> bool:
        """Whether nothing has come yet that the client lacks."""
        return not self._has_begun

    def begin(self) -> bytes:
        events = self._writer.begin()
        return b"" if any(self._has) else events

    def events(self, delta: Delta) -> bytes:
        """Raises RequestRefused if the answer ends before what the client has of it."""
        choice, has = delta.choice, self._has[delta.choice.index]
        if choice.num_tokens > has or not has:
            self._has_begun = True
            return self._writer.events(delta)
        self._writer.events(delta._replace(finish_reason=None))
        if delta.finish_reason is None:
            return b""
        if choice.num_tokens < has:
            raise _shorter(choice.num_tokens, has)
        self._has_begun = True
        return self._writer.events(delta._replace(text="", tokens=(), calls=(), reasoning=""))

    def end(self) -> bytes:
        return self._writer.end()

    def error(self, error: ApiError) -> bytes:
        return self._writer.error(error)


def _shorter(num_tokens: int, has: int) -> RequestRefused:
    text = (
        f"The answer has {num_tokens} tokens, and {HEADER} says that you have {has}. Send the"
        f" request again without {HEADER}."
    )
    return RequestRefused(409, "answer_differs", text)
