"""The process that reads large bodies: `python -m moonpool.api.body_process`.

Frames of 4 length bytes and msgpack come on its standard input, and go to its standard output. The
first one is `BodyStart`. It is a process and not a thread because decoding and chat templates hold
the interpreter, so the head's loop would stand still for seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import msgspec

from moonpool.api.bodies import ChatBody, CompletionBody, EmbeddingsBody
from moonpool.api.errors import ApiError
from moonpool.api.frontend import ApiOptions, ModelCard
from moonpool.api.models.forwarded_bodies import FORWARDED, ForwardedBody
from moonpool.api.preparation import (
    CHAT,
    COMPLETION,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    PreparedCall,
    Preparer,
)
from moonpool.api.responses import ResponsesBody
from moonpool.api.tools import Tools
from moonpool.engine.tokenizer import Tokenizer
from moonpool.engine.tokenizers.byte import ByteTokenizer
from moonpool.engine.tokenizers.huggingface import HfTokenizer
from moonpool.transfer.parent import end_with
from moonpool.types import Struct

Kind = Literal[
    "chat",
    "completion",
    "embeddings",
    "responses",
    "messages",
    "count_tokens",
    "tokenize",
    "detokenize",
    "forwarded",
    "pooling",
]
BYTE_TOKENIZER = "bytes"  # as in `engine.model_info`
MAX_REST_BYTES = 1 << 20
"""Largest body without its prompt. The head's loop decodes it."""
LENGTH = struct.Struct("<I")


class BodyStart(Struct, frozen=True):
    """What the process needs to know. `tokenizer` is as in `engine.builtin.LoadedModel`."""

    parent_pid: int
    tokenizer: str
    chat_template: str
    vocab_size: int
    card: ModelCard
    served_names: tuple[str, ...]
    max_choices: int
    max_logprobs: int


class BodyWork(Struct, frozen=True):
    kind: Kind
    raw: bytes


class BodyError(Struct, frozen=True):
    """An `ApiError` on its way between processes."""

    message: str
    status: int
    param: str | None
    code: str | None

    def as_error(self) -> ApiError:
        return ApiError(self.message, status=self.status, param=self.param, code=self.code)


class BodyResult(Struct, frozen=True):
    """The result: an error, a whole response, or a call.

    `body` and `original` are JSON without the prompt. Each prompt is an array of int32.
    """

    error: BodyError | None = None
    response: bytes = b""
    body: bytes = b""
    original: bytes = b""
    prompts: tuple[bytes, ...] = ()
    echoes: tuple[str, ...] = ()
    grammar: str = ""
    grammar_field: str = ""
    num_tokens: int = 0
    is_exact: bool = False


_WORK = msgspec.msgpack.Decoder(BodyWork)
_START = msgspec.msgpack.Decoder(BodyStart)
_READ_ALREADY = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "response_format",
    "structured_outputs",
)


def pack(kind: Kind, prepared: PreparedCall) -> BodyResult:
    """Returns the call without what only its preparation needed. Raises `ApiError`."""
    body, original = prepared.body, prepared.original
    if isinstance(original, ForwardedBody):
        return BodyResult(
            original=msgspec.json.encode(original),
            prompts=_packed(prepared.prompts),
            num_tokens=prepared.num_tokens,
            is_exact=prepared.is_exact,
        )
    gone: dict[str, Any] = dict.fromkeys(_READ_ALREADY)
    if isinstance(body, ChatBody):
        gone |= {"messages": None, "chat_template_kwargs": None}
    else:
        gone |= {"prompt": None}
    rest = msgspec.json.encode(msgspec.structs.replace(body, **gone))
    if original is not None:
        has_input = isinstance(original, ResponsesBody | EmbeddingsBody)
        field = "input" if has_input else "messages"
        original = msgspec.structs.replace(original, **{field: None})
    kept = b"" if original is None else msgspec.json.encode(original)
    if len(rest) + len(kept) > MAX_REST_BYTES:
        text = (
            f"The fields of the body besides its prompt exceed {MAX_REST_BYTES} bytes."
            " Shorten them."
        )
        raise ApiError(text, status=413, code="body_too_large")
    return BodyResult(
        body=rest,
        original=kept,
        prompts=_packed(prepared.prompts),
        echoes=tuple(prepared.echoes),
        grammar=prepared.grammar,
        grammar_field=prepared.grammar_field,
    )


def _packed(prompts: Sequence[Sequence[int]]) -> tuple[bytes, ...]:
    return tuple(array("i", token_ids).tobytes() for token_ids in prompts)


def unpack(kind: Kind, done: BodyResult) -> PreparedCall:
    prompts = []
    for data in done.prompts:
        token_ids = array("i")
        token_ids.frombytes(data)
        prompts.append(tuple(token_ids))
    if kind in ("forwarded", "pooling"):
        forwarded = FORWARDED.decode(done.original) if done.original else None
        return PreparedCall(
            CompletionBody(),
            prompts,
            original=forwarded,
            num_tokens=done.num_tokens,
            is_exact=done.is_exact,
        )
    if kind in ("completion", "embeddings"):
        body: CompletionBody | ChatBody = COMPLETION.decode(done.body)
        embedded = EMBEDDINGS.decode(done.original) if kind == "embeddings" else None
        return PreparedCall(
            body,
            prompts,
            done.grammar,
            echoes=done.echoes,
            original=embedded,
            grammar_field=done.grammar_field,
        )
    chat = CHAT.decode(done.body)
    original: Any = None
    if done.original:
        original = (RESPONSES if kind == "responses" else MESSAGES).decode(done.original)
    return PreparedCall(
        chat,
        prompts,
        done.grammar,
        Tools(chat),
        original=original,
        grammar_field=done.grammar_field,
    )


async def perform(preparer: Preparer, work: BodyWork) -> BodyResult:
    """Prepares one body. All its errors are in the result."""
    try:
        found = await getattr(preparer, work.kind)(work.raw)
        return BodyResult(response=found) if isinstance(found, bytes) else pack(work.kind, found)
    except ApiError as error:
        message = error.message
        return BodyResult(error=BodyError(message, error.status, error.param, error.code))


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)  # running answers come first
    start = _START.decode(_read(source) or b"")
    end_with(start.parent_pid)
    options = ApiOptions(
        served_names=start.served_names,
        max_choices=start.max_choices,
        max_logprobs=start.max_logprobs,
        thread_above_chars=1 << 40,
    )
    preparer = Preparer(_open(start), start.card, options)
    with asyncio.Runner() as runner:
        while frame := _read(source):
            done = runner.run(perform(preparer, _WORK.decode(frame)))
            body = msgspec.msgpack.encode(done)
            sink.write(LENGTH.pack(len(body)) + body)
            sink.flush()


def _open(start: BodyStart) -> Tokenizer:
    tokenizer: Tokenizer
    if start.tokenizer == BYTE_TOKENIZER:
        tokenizer = ByteTokenizer(start.vocab_size)
    else:
        tokenizer = HfTokenizer(Path(start.tokenizer))
    if start.chat_template:
        tokenizer.use_chat_template(start.chat_template)
    return tokenizer


def _read(source: BinaryIO) -> bytes:
    """Returns the next frame; empty at the end."""
    head = source.read(LENGTH.size)
    return source.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else b""


assert set(get_args(Kind)) <= set(dir(Preparer))

if __name__ == "__main__":
    main()
