"""Ids of server-sent events, with which a client can continue at any head, even one without a log.

A call with the header `Last-Event-ID: 0` gets an `id:` with each event. The same call with the id
of the last event that arrived gets the events after it. For that, the answer is computed again. An
id contains the seeds of the response, so the tokens and bytes are the same, and a digest of the
tokens so far, so that a different answer becomes an error instead of a wrong continuation.

A client without ids sends the same call with the same `X-Request-Id`, and the number of tokens that
it has in `X-Resume-Tokens`. The part of the answer that the server knows is not computed again.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from moonpool.api.choice import Choice, Delta
from moonpool.api.connection.kept_stream import StreamFacts
from moonpool.api.errors import ApiError
from moonpool.api.serving_backend import RequestRefused
from moonpool.api.shapes import EventWriter
from moonpool.protocol.sparse import without_defaults

HEADER = "Last-Event-ID"
MAX_ID_BYTES = 8192
_FACTS = struct.Struct(">BQQ16s8s")
_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9._:+=-]{1,160}")
_DIGEST_BYTES = 6


class Progress(NamedTuple):
    """The part of one choice that a client has."""

    events: int
    digest: str  # digest of the tokens from which these events came


class EventPosition(NamedTuple):
    """An event id: the response that it belongs to, and how far its client has come in it."""

    request_id: str
    seed: int
    created_s: int
    ids: bytes
    call: bytes  # a digest of the request
    # one entry per choice; empty if the client has received nothing
    progress: tuple[Progress, ...] = ()

    @classmethod
    def of(cls, facts: StreamFacts, request_id: str, call: bytes) -> EventPosition:
        """Returns the position at which a response begins."""
        return cls(request_id, facts.seed, facts.created_s, facts.ids, call)

    def facts(self, max_model_tokens: int, system_fingerprint: str = "") -> StreamFacts:
        return StreamFacts(
            request_id=self.request_id,
            seed=self.seed,
            created_s=self.created_s,
            ids=self.ids,
            max_model_tokens=max_model_tokens,
            tells_reasoning=True,
            system_fingerprint=system_fingerprint,
        )

    def prefix(self) -> str:
        """Returns the text with which all ids of a response begin."""
        packed = _FACTS.pack(_VERSION, self.seed, self.created_s, self.ids, self.call)
        return f"{_text(packed)}/{self.request_id}/"


NOTHING = EventPosition("", 0, 0, b"", b"")


def last_event_id(headers: dict[bytes, bytes]) -> EventPosition | None:
    """Returns the position that the client has reached in the response, or None if it wants no ids.

    Raises ApiError for an id that is not one of this server's.
    """
    raw = headers.get(HEADER.lower().encode())
    if raw is None:
        return None
    if raw.strip() in (b"", b"0"):
        return NOTHING
    try:
        return _read(raw.strip())
    except (ValueError, struct.error):
        text = (
            f"The header {HEADER} must be 0, or the id of the last event that arrived, whole and"
            " unchanged."
        )
        raise ApiError(text, param=HEADER, code="invalid_header") from None


def _read(raw: bytes) -> EventPosition:
    if len(raw) > MAX_ID_BYTES:
        raise ValueError("too long")
    packed, request_id, progress = raw.decode("ascii").split("/")
    version, seed, created_s, ids, call = _FACTS.unpack(_bytes(packed))
    if version != _VERSION or not _NAME.fullmatch(request_id) or seed >= 1 << 63:
        raise ValueError("another version")
    return EventPosition(request_id, seed, created_s, ids, call, tuple(_progress(progress)))


def _progress(text: str) -> Iterator[Progress]:
    for part in text.split("."):
        count, _, digest = part.partition("+")
        if not (count.isascii() and count.isdigit() and len(count) <= 9):
            raise ValueError("no number of events")
        yield Progress(int(count), digest)


def digest_of_call(path: str, model: str, choices: Sequence[Choice]) -> bytes:
    """Returns a digest of everything that determines the answer: the path, the model, the prompts
    and sampling."""
    made = hashlib.blake2b(path.encode() + b"\0" + model.encode(), digest_size=8)
    for choice in choices:
        request = choice.request
        # Without defaults, so that a parameter which a release adds changes no other call.
        sampling = without_defaults(request.sampling)
        made.update(msgspec.msgpack.encode((request.token_ids, sampling, request.adapter)))
        made.update(msgspec.msgpack.encode(choice.ending_key))
    return made.digest()


class NumberedEvents:
    """Gives each event of a response its id, and leaves out the events that the client has.

    Each choice must receive its tokens one by one, so that its events do not depend on how many
    tokens arrived together.
    """

    def __init__(
        self, writer: EventWriter, start: EventPosition, num_choices: int, has: Sequence[Progress]
    ) -> None:
        """`start`: the start of the response. `has`: the progress of the client in each choice, or
        nothing.

        Raises ApiError if `has` is of another number of choices.
        """
        if has and len(has) != num_choices:
            raise another_call()
        self._writer = writer
        self._prefix = start.prefix()
        self._has = has
        self._counts = [0] * num_choices
        self._tokens = [hashlib.blake2b(digest_size=_DIGEST_BYTES) for _ in range(num_choices)]
        self._digests = [""] * num_choices
        self._has_begun = not has

    @property
    def catches_up(self) -> bool:
        """Whether no event has come yet that the client lacks."""
        return not self._has_begun

    def begin(self) -> bytes:
        return self._numbered(self._writer.begin(), 0)

    def events(self, delta: Delta) -> bytes:
        """Raises RequestRefused if the answer differs from what the client has of it."""
        index = delta.choice.index
        tokens = self._tokens[index]
        for token in delta.output.tokens:
            tokens.update(b"%d," % token.token_id)
        self._digests[index] = _text(tokens.digest())
        return self._numbered(self._writer.events(delta), index)

    def end(self) -> bytes:
        """Raises RequestRefused if the answer ends before what the client has of it."""
        events = self._numbered(self._writer.end(), 0)
        if any(has.events > n for has, n in zip(self._has, self._counts, strict=False)):
            raise _differs()
        return events

    def error(self, error: ApiError) -> bytes:
        """Sends an error without an id: a client may try again from the event before."""
        return self._writer.error(error)

    def _numbered(self, events: bytes, index: int) -> bytes:
        parts: list[bytes] = []
        for event in events.split(b"\n\n")[:-1]:
            self._counts[index] += 1
            if self._has and self._counts[index] <= self._has[index].events:
                self._compare(index)
                continue
            self._has_begun = True
            counts = [f"{n}+{d}" for n, d in zip(self._counts, self._digests, strict=True)]
            event_id = self._prefix + ".".join(counts)
            parts.append(b"id: %b\n%b\n\n" % (event_id.encode(), event))
        return b"".join(parts)

    def _compare(self, index: int) -> None:
        count, digest = self._has[index]
        if self._counts[index] == count and self._digests[index] != digest:
            raise _differs()


def _differs() -> RequestRefused:
    text = (
        "The answer, computed again, differs from what its client has of it. Send the request again"
        f" from its beginning, with {HEADER}: 0."
    )
    return RequestRefused(409, "answer_differs", text)


def another_call() -> ApiError:
    text = (
        f"The header {HEADER} is of another request, model or path. Send the request unchanged, or"
        f" {HEADER}: 0 to begin."
    )
    return ApiError(text, status=409, param=HEADER, code="another_request")


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)


RESUME = "X-Resume-Tokens"
INSTEAD = "Last-Event-ID instead of X-Resume-Tokens"
_COUNTS = re.compile(rb"\d{1,9}(,\d{1,9}){0,255}")


def resume_tokens(headers: dict[bytes, bytes]) -> tuple[int, ...] | None:
    """Returns how many tokens the client has of each choice, or None if it does not say. Raises
    ApiError."""
    raw = headers.get(RESUME.lower().encode())
    if raw is None:
        return None
    raw = raw.replace(b" ", b"")
    if not _COUNTS.fullmatch(raw):
        text = f"The header {RESUME} must be the number of tokens that you have; of several"
        raise ApiError(
            f"{text} choices, the numbers with commas.", param=RESUME, code="invalid_header"
        )
    return tuple(int(count) for count in raw.split(b","))


def check_resumption(
    has: Sequence[int], choices: Sequence[Choice], is_streamed: bool, seed_is_unknown: bool
) -> None:
    """Raises ApiError if the rest of the answer cannot be sent. `seed_is_unknown`: whether the seed
    of the client's answer is unknown."""
    if len(has) != len(choices):
        text = f"The header {RESUME} has {len(has)} numbers, the call has {len(choices)} choices."
        raise ApiError(text, param=RESUME, code="invalid_header")
    if not any(has):
        return
    if not is_streamed:
        text = f"The header {RESUME} is for streams. Without it, the whole answer is sent again."
        raise ApiError(text, param=RESUME, code="invalid_header")
    if any(choice.has_tools for choice in choices):
        text = f"A number of tokens does not tell which tool calls arrived. Use {INSTEAD}."
        raise ApiError(text, param=RESUME, code="invalid_header")
    if seed_is_unknown and any(choice.request.sampling.temperature > 0 for choice in choices):
        text = (
            "This server knows no answer to the same request with this X-Request-Id. It was drawn"
            f" without a seed, so it cannot be computed again. Send the request without {RESUME}."
        )
        raise ApiError(text, status=409, param="X-Request-Id", code="answer_unknown")


class ResumedEvents:
    """Leaves out the events of tokens that the client already has.

    Each choice must receive its tokens one by one.
    """

    def __init__(self, writer: EventWriter, has: Sequence[int]) -> None:
        """`has`: number of tokens that the client has of each choice."""
        self._writer = writer
        self._has = tuple(has)
        self._has_begun = not any(has)

    @property
    def catches_up(self) -> bool:
        """Whether no event has come yet that the client lacks."""
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
        f"The answer has {num_tokens} tokens, and {RESUME} says that you have {has}. Send the"
        f" request again without {RESUME}."
    )
    return RequestRefused(409, "answer_differs", text)
