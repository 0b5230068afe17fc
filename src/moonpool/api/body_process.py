"""The process that reads bodies: `python -m moonpool.api.body_process PARENT_PID FD`.

The body process is a helper process (`helpers`) whose frames are msgpack. The first frame is
`BodyStart`, and its reply `BodyReady`. Then each `BodyWork` gets a `BodyResult`, in order; a
`UseCard` gets none. FD is the memory in which the process notes what it does (`StageNote`).

The body process is a process and not a thread because large bodies hold the interpreter, so the
head's loop would stand still for seconds, and because a model's chat template or tokenizer may not
end at all.
"""

from __future__ import annotations

import os
import sys
import traceback
from array import array
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from moonpool.api.bodies import ChatBody, CompletionBody
from moonpool.api.body_reading.limits import (
    LOAD_BYTES,
    LOAD_S,
    CallLimits,
    LimitReachedError,
    ReadStage,
    StageNote,
    body_bytes,
    limit_error,
    too_large,
    too_long,
)
from moonpool.api.errors import ApiError
from moonpool.api.helpers.parent import join_parent
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
from moonpool.api.serving_backend import ApiOptions, ModelCard
from moonpool.api.tools import Tools
from moonpool.text.shown import shown_name
from moonpool.text.tokenizer import ChatTemplateError, Tokenizer, TokenizerError, TokenizerParts
from moonpool.text.tokenizers.byte import ByteTokenizer
from moonpool.text.tokenizers.huggingface import HfTokenizer
from moonpool.types import BadWord, Struct

Kind = Literal[
    "chat",
    "completion",
    "embeddings",
    "responses",
    "messages",
    "count_tokens",
    "input_tokens",
    "tokenize",
    "detokenize",
    "forwarded",
    "routed",
    "pooling",
]
BYTE_TOKENIZER = "bytes"  # same value as in `engine.tokenizers`
LARGE_BYTES = 64 << 10
MAX_REMEMBERED = 4096
MAX_REST_BYTES = 1 << 20
"""Size of the largest body without its prompt. The head's event loop decodes that part."""


class BodyStart(Struct, frozen=True):
    """What the process needs to know. `tokenizer`: as in `engine.builtin.LoadedModel`; `parts`: the
    content of the tokenizer's file, if that is not a folder."""

    tokenizer: str
    parts: TokenizerParts | None
    chat_template: str
    vocab_size: int
    served_names: tuple[str, ...]
    max_choices: int
    max_logprobs: int
    yields: bool  # whether the process yields to running answers when cores are scarce


class BodyReady(Struct, frozen=True):
    """Reports that the tokenizer is loaded and the template compiles; otherwise `error` says why
    not."""

    error: str = ""


class BodyWork(Struct, frozen=True, tag=True):
    """One body. `num_replies`: how many replies its sender has had from this process."""

    kind: Kind
    raw: bytes
    party: str
    limit_s: float
    num_replies: int = 0


class UseCard(Struct, frozen=True, tag=True):
    card: ModelCard


class BodyError(Struct, frozen=True):
    """An `ApiError` on its way between processes."""

    message: str
    status: int
    param: str | None
    code: str | None

    @classmethod
    def of(cls, error: ApiError) -> BodyError:
        return cls(error.message, error.status, error.param, error.code)

    def as_error(self) -> ApiError:
        return ApiError(self.message, status=self.status, param=self.param, code=self.code)


class BodyResult(Struct, frozen=True):
    """The result of reading a body: an error, a whole response, or a call.

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
    num_calls: int = 0  # number of tool calls in the messages
    bad_words: tuple[BadWord, ...] = ()
    was_exhausted: bool = False  # whether the body took all the time or memory that it was allowed
    fault: str = ""  # a traceback
    # whether the body was left unread because another body of its party had just taken too much
    was_left: bool = False
    num_tokens: int = 0
    is_exact: bool = False


_FRAME: msgspec.msgpack.Decoder[BodyWork | UseCard] = msgspec.msgpack.Decoder(BodyWork | UseCard)
_encode = msgspec.msgpack.Encoder().encode
_START = msgspec.msgpack.Decoder(BodyStart)
_READ_ALREADY = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_retention",
    "prompt_cache_options",
    "response_format",
    "structured_outputs",
    "bad_words",
)


def pack(kind: Kind, prepared: PreparedCall) -> BodyResult:
    """Returns the call without the fields that only its preparation needed. Raises `ApiError`."""
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
        fields = {"input", "messages"}.intersection(original.__struct_fields__)
        original = msgspec.structs.replace(original, **dict.fromkeys(fields))
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
        num_calls=0 if prepared.tools is None else prepared.tools.num_calls_before,
        bad_words=prepared.bad_words,
    )


def _packed(prompts: Sequence[Sequence[int]]) -> tuple[bytes, ...]:
    return tuple(array("i", token_ids).tobytes() for token_ids in prompts)


def unpack(kind: Kind, done: BodyResult) -> PreparedCall:
    prompts = []
    for data in done.prompts:
        token_ids = array("i")
        token_ids.frombytes(data)
        prompts.append(tuple(token_ids))
    body: CompletionBody | ChatBody
    decoder: msgspec.json.Decoder[Any]
    tools = None
    if kind in ("forwarded", "routed", "pooling"):
        body, decoder = CompletionBody(), FORWARDED
    elif kind in ("completion", "embeddings"):
        body, decoder = COMPLETION.decode(done.body), EMBEDDINGS
    else:
        body = CHAT.decode(done.body)
        decoder = RESPONSES if kind == "responses" else MESSAGES
        tools = Tools(body, done.num_calls)
    return PreparedCall(
        body,
        prompts,
        done.grammar,
        tools,
        echoes=done.echoes,
        original=decoder.decode(done.original) if done.original else None,
        grammar_field=done.grammar_field,
        bad_words=done.bad_words,
        num_tokens=done.num_tokens,
        is_exact=done.is_exact,
    )


class _Noted:
    """A tokenizer that shows other processes what it is rendering or tokenising now."""

    def __init__(self, tokenizer: Tokenizer, note: StageNote) -> None:
        self._tokenizer = tokenizer
        self._note = note

    def render_chat(self, *arguments: Any, **named: Any) -> str:
        self._note.set(ReadStage.TEMPLATE)
        text = self._tokenizer.render_chat(*arguments, **named)
        self._note.set(ReadStage.OTHER)
        return text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self._note.set(ReadStage.TOKENIZER)
        found = self._tokenizer.encode(text, add_special_tokens)
        self._note.set(ReadStage.OTHER)
        return found

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self._note.set(ReadStage.TOKENIZER)
        text = self._tokenizer.decode(token_ids, skip_special_tokens)
        self._note.set(ReadStage.OTHER)
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


async def _here(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _finished(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine that waits for nothing, without an event loop."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a body waits for something")


def perform(preparer: Preparer, work: BodyWork) -> BodyResult:
    """Prepares one body. The errors of the work are in the result. Raises MemoryError."""
    try:
        found = _finished(getattr(preparer, work.kind)(work.raw))
        return BodyResult(response=found) if isinstance(found, bytes) else pack(work.kind, found)
    except ApiError as error:
        return BodyResult(error=BodyError.of(error))


class _Reader:
    """Reads bodies within their limits."""

    def __init__(self, start: BodyStart, note: StageNote, limits: CallLimits) -> None:
        """Raises `TokenizerError` and `ChatTemplateError`."""
        self._start = start
        self._note = note
        self._limits = limits
        self._tokenizer = open_tokenizer(start)
        self._tokenizer.check_chat_template()
        self._limits.settle()
        self._preparer: Preparer | None = None
        self._num_replies = 1  # counts the reply that the process is ready
        self._exhausted: dict[str, int] = {}  # number of the last exhausted reply, by party

    def use(self, card: ModelCard) -> None:
        if self._preparer is not None:
            self._preparer.use(card)
            return
        options = ApiOptions(
            served_names=self._start.served_names,
            max_choices=self._start.max_choices,
            max_logprobs=self._start.max_logprobs,
        )
        noted: Any = _Noted(self._tokenizer, self._note)
        self._preparer = Preparer(noted, card, options, _here)

    def read(self, work: BodyWork) -> BodyResult:
        self._num_replies += 1
        if work.num_replies < self._exhausted.get(work.party, 0):
            # the sender does not know yet that the party was exhausted
            return BodyResult(was_left=True)
        result = self._read(work)
        if result.was_exhausted:
            if len(self._exhausted) == MAX_REMEMBERED:
                self._exhausted.clear()
            self._exhausted[work.party] = self._num_replies
        return result

    def _read(self, work: BodyWork) -> BodyResult:
        assert self._preparer is not None
        self._note.set(ReadStage.OTHER)
        try:
            with self._limits.within(work.limit_s, body_bytes(len(work.raw))):
                return perform(self._preparer, work)
        except LimitReachedError:
            error = too_long(work.kind, self._note.stage, work.limit_s)
        except MemoryError:
            error = too_large(work.kind, self._note.stage)
        except Exception:  # a fault of moonpool itself
            return BodyResult(fault=traceback.format_exc())
        except BaseException as panic:  # a panic of the tokenizers library
            error = limit_error(work.kind, self._note.stage, f"fails ({shown_name(str(panic))})")
            return BodyResult(error=BodyError.of(error))
        return BodyResult(error=BodyError.of(error), was_exhausted=True)


def main(parent_pid: int, note_fd: int) -> None:
    parent = join_parent(parent_pid)
    start = _START.decode(parent.receive() or b"")
    if start.yields:
        os.nice(5)
    limits = CallLimits()
    try:
        with limits.within(LOAD_S, LOAD_BYTES):
            reader = _Reader(start, StageNote(note_fd), limits)
    except TokenizerError as error:
        parent.send(_encode(BodyReady(error=str(error))))
        return
    except ChatTemplateError as error:
        where = "--chat-template" if start.chat_template else start.tokenizer
        parent.send(_encode(BodyReady(error=f"{where}: {error}")))
        return
    except (LimitReachedError, MemoryError):
        return  # the parent sees that the process did not get ready
    parent.send(_encode(BodyReady()))
    while (frame := parent.receive()) is not None:
        work = _FRAME.decode(frame)
        if isinstance(work, UseCard):
            reader.use(work.card)
            continue
        result = reader.read(work)
        parent.send(_encode(result))
        if (result.was_exhausted or len(work.raw) > LARGE_BYTES) and not limits.has_room:
            break  # another process takes the place of this one
    os._exit(0)  # ends at once, because the remaining objects take long to free


def open_tokenizer(start: BodyStart) -> Tokenizer:
    tokenizer: Tokenizer
    if start.tokenizer == BYTE_TOKENIZER:
        tokenizer = ByteTokenizer(start.vocab_size)
    else:
        tokenizer = HfTokenizer(start.parts or Path(start.tokenizer))
    if start.chat_template:
        tokenizer.use_chat_template(start.chat_template)
    return tokenizer


assert set(get_args(Kind)) <= set(dir(Preparer))

if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
