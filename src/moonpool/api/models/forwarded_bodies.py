"""Bodies of calls that go unchanged to a vLLM server: those with images or sounds, those whose
answers the server parses, and those for models that generate nothing.

The Conductor needs a prompt to place a call: the prompt's length is its load, and its first blocks
may be cached on an instance. Text before the first image is tokenised as the server does it. All
other content gets made-up tokens, which are equal where the content is equal.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from moonpool.api.bodies import decode_body
from moonpool.api.errors import ApiError
from moonpool.api.serving_backend import ModelCard

MEDIA_TOKENS = 512
"""Made-up tokens of an image or a sound: about as many as a small image has."""
MOST_MADE_UP = 1 << 20
CHARS = 16
"""A text with more than this many characters per token of the context is not tokenised."""
MEDIA_TYPES = frozenset(
    {
        "image",
        "image_url",
        "image_embeds",
        "input_image",
        "input_audio",
        "audio_url",
        "audio_embeds",
        "video_url",
        "document",
        "input_file",
        "file",
    }
)
_MARKS = tuple(f'"{name}"'.encode() for name in MEDIA_TYPES)
_PLACE = "\ufffc"  # a character that stands for an object within a text
_POOLED_FIELDS = (
    "prompt",
    "input",
    "query",
    "text_1",
    "queries",
    "documents",
    "text_2",
    "items",
    "messages",
)
_TOKEN_BYTES = 4
MOST_ANSWERS = 128
"""The most answers to one prompt, the upper limit of `n`."""


class ForwardedBody(msgspec.Struct, kw_only=True):
    """The fields of a forwarded body that moonpool reads. The server reads and checks all other
    fields."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    prompt_cache_key: Any = None
    vllm_xargs: Any = None
    agent_hint: Any = None
    n: int | None = None

    @property
    def num_answers(self) -> int:
        """Returns how many answers each prompt gets."""
        return min(max(self.n or 1, 1), MOST_ANSWERS)

    @property
    def most_tokens(self) -> int | None:
        """Returns the most tokens that are generated, by the names of the field in all APIs."""
        given = (self.max_completion_tokens, self.max_output_tokens, self.max_tokens)
        return next((one for one in given if one is not None), None)


class _MediaBody(ForwardedBody, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    input: list[Any] | str | None = None
    system: Any = None
    instructions: Any = None
    prompt: Any = None


FORWARDED = msgspec.json.Decoder(ForwardedBody)
_MEDIA = msgspec.json.Decoder(_MediaBody)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def may_hold_media(raw: bytes) -> bool:
    """Whether the body may contain images or sounds, so that it must be read."""
    return any(mark in raw for mark in _MARKS)


@dataclass(frozen=True, slots=True)
class EstimatedPrompt:
    """`token_ids` has at most a context's length; `num_tokens` counts all tokens. `is_exact`:
    whether the tokens are the server's own."""

    body: ForwardedBody
    token_ids: tuple[int, ...]
    num_tokens: int
    is_exact: bool = False


class ForwardedReader:
    """Reads such bodies for one model. `render` returns the text of plain chat messages, without an
    answer's beginning. `encode` tokenises. All methods raise ApiError."""

    def __init__(
        self,
        card: ModelCard,
        render: Callable[[Sequence[dict[str, Any]]], str],
        encode: Callable[[str, bool], Sequence[int]],
    ) -> None:
        self._card = card
        self._render = render
        self._encode = encode

    def media(self, raw: bytes) -> EstimatedPrompt | None:
        """Reads a body with messages. Returns None if the messages hold no images or sounds."""
        body = decode_body(_MEDIA, raw)
        said = body.messages if body.messages is not None else body.input
        if not isinstance(said, list):
            return None
        media: list[bytes] = []
        plain = [_without_media(item, media) for item in said]
        if not media:
            return None
        opening = [body.system or body.instructions] if body.system or body.instructions else []
        text = self._text(opening, plain) if body.messages is not None else None
        if text is None:
            text = "\n".join(_texts([*opening, *plain]))
        before, *after = text.split(_PLACE)
        tokens = array("i", self._encode(before[: self._card.max_model_tokens * CHARS], False))
        for number, piece in enumerate(after):
            tokens.extend(_made_up(hashlib.sha256(media[min(number, len(media) - 1)]).digest()))
            tokens.extend(_of_text(piece))
        return self._estimate(body, tokens)

    def whole(self, raw: bytes, prompt: Sequence[int]) -> EstimatedPrompt:
        """Estimates a body with messages whose prompt is known."""
        found = self._estimate(decode_body(FORWARDED, raw), array("i", prompt))
        return replace(found, is_exact=True)

    def texts(self, raw: bytes) -> EstimatedPrompt:
        """Estimates the prompt of a body with messages that this process cannot render."""
        body = decode_body(_MEDIA, raw)
        said = [body.system or body.instructions, body.messages or body.input, body.prompt]
        tokens = _of_text("\n".join(_texts(said)))
        if isinstance(body.prompt, list) and not tokens:  # a prompt of token ids
            self._add(body.prompt, tokens)
        return self._estimate(body, tokens)

    def pooling(self, raw: bytes) -> EstimatedPrompt:
        """Reads a body of an endpoint that computes vectors, scores or classes of texts, or that
        completes a prompt."""
        body = decode_body(FORWARDED, raw)
        fields = _FIELDS.decode(raw)
        tokens = array("i")
        for name in _POOLED_FIELDS:
            if name in fields and len(tokens) < MOST_MADE_UP:
                self._add(msgspec.json.decode(fields[name]), tokens)
        found = self._estimate(body, tokens)
        prompt = fields.get("prompt")
        is_one = prompt is not None and _is_one_prompt(msgspec.json.decode(prompt))
        return replace(found, is_exact=is_one and len(found.token_ids) == found.num_tokens)

    def _add(self, given: Any, tokens: array[int]) -> None:
        """Adds texts and token ids as they stand. The first text gets its true tokens."""
        if isinstance(given, list) and given and _are_ids(given):
            tokens.extend(min(max(one, 0), 2**31 - 1) for one in given)
            return
        if isinstance(given, list) and given and isinstance(given[0], list):
            for one in given:
                self._add(one, tokens)
            return
        for text in _texts([given]):
            is_first = not tokens and len(text) <= self._card.max_model_tokens * CHARS
            tokens.extend(self._encode(text, True) if is_first else _of_text(text))

    def _text(self, opening: Sequence[Any], plain: Sequence[Any]) -> str | None:
        """Returns the rendered chat, or None if the template does not accept these messages."""
        system = [{"role": "system", "content": text} for text in _texts(opening)]
        try:
            return self._render([*system, *plain])
        except ApiError:
            return None

    def _estimate(self, body: ForwardedBody, tokens: array[int]) -> EstimatedPrompt:
        most = max(min(self._card.max_model_tokens - 1, MOST_MADE_UP), 1)
        known = ForwardedBody(
            **{name: getattr(body, name) for name in ForwardedBody.__struct_fields__}
        )
        return EstimatedPrompt(known, tuple(tokens[:most]) or (0,), max(len(tokens), 1))


def _is_one_prompt(given: Any) -> bool:
    return isinstance(given, str) or (isinstance(given, list) and bool(given) and _are_ids(given))


def _are_ids(given: list[Any]) -> bool:
    return all(type(one) is int for one in given)


def _without_media(item: Any, media: list[bytes]) -> Any:
    """Returns a message with a mark in place of each image or sound, which is appended to
    `media`."""
    if not isinstance(item, dict):
        return item
    return {
        name: [_without(part, media) for part in value] if isinstance(value, list) else value
        for name, value in item.items()
    }


def _without(part: Any, media: list[bytes]) -> Any:
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind in MEDIA_TYPES:
        media.append(msgspec.json.encode(part))
        return {"type": "text", "text": _PLACE}
    if isinstance(part.get("content"), list):  # the message is the result of a tool
        return part | {"content": [_without(one, media) for one in part["content"]]}
    return part


def _texts(given: Any) -> Iterator[str]:
    """Yields all texts within a value, in their order."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, list):
        for one in given:
            yield from _texts(one)
    elif isinstance(given, dict):
        for name, one in given.items():
            if name not in ("type", "role", "id", "call_id"):
                yield from _texts(one)


def _of_text(text: str) -> array[int]:
    """Returns made-up tokens of four bytes each, so that equal beginnings are equal."""
    data = text.encode("utf-8", "surrogatepass")[: MOST_MADE_UP * _TOKEN_BYTES]
    data += b" " * (-len(data) % _TOKEN_BYTES)
    tokens = array("I", data)
    return array("i", (token & 0x7FFFFFFF for token in tokens))


def _made_up(digest: bytes) -> array[int]:
    """Returns made-up tokens for a content with this digest."""
    seed = int.from_bytes(digest[:8], "little")
    return array("i", ((seed + number * 0x9E3779B1) & 0x7FFFFFFF for number in range(MEDIA_TOKENS)))
