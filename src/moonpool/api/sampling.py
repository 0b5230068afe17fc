"""Converts the sampling fields of a body to `SamplingParams` and the rules that end an output.

This module owns the ranges: OpenAI's if OpenAI has the field, else vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonpool.api.bodies import ChatBody, CompletionBody, GenerationBody
from moonpool.api.errors import ApiError
from moonpool.api.serving_backend import ModelCard
from moonpool.types import PRIORITY_RANGE, SAMPLING_RANGES, BadWord, SamplingParams

_SEED_MODULUS = 1 << 63
MOST_TOKENS = 2**31 - 1
MOST_STOPS = 16
LONGEST_STOP_CHARS = 4096
_DEFAULT_COMPLETION_TOKENS = 16
MOST_BIASES = 1024
LARGEST_BIAS = 100
MOST_ALLOWED = 16_384
MOST_LISTED = 128
"""Most tokens of `logprob_token_ids`, as in vLLM."""

RANGES: tuple[tuple[str, float, float], ...] = (
    *((name, least, most) for name, (least, most) in SAMPLING_RANGES.items()),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("n", 1, 128),
    ("min_tokens", 0, MOST_TOKENS),
    ("priority", *PRIORITY_RANGE),
    ("seed", -(2**63), 2**63 - 1),
)


@dataclass(frozen=True, slots=True)
class Ending:
    """What ends an output besides its length, and how the end appears in the text."""

    stops: tuple[str, ...]
    include_stop: bool
    stop_token_ids: frozenset[int]
    silent_token_ids: frozenset[int]  # tokens that have no text if the answer ends with them
    min_tokens: int
    skip_special_tokens: bool


def check_range(body: object, name: str, least: float, most: float) -> None:
    """Raises ApiError unless the field `name` is absent or lies in [least, most]."""
    value = getattr(body, name)
    if value is not None and not least <= value <= most:
        raise ApiError(
            f"Invalid value for '{name}': {_short(value)}. "
            f"It must be between {_short(least)} and {_short(most)}.",
            param=name,
        )


def _short(value: float) -> str:
    text = format(value, "g") if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def check_ranges(body: ChatBody | CompletionBody) -> None:
    """Raises ApiError for the first field out of its range."""
    for name, least, most in RANGES:
        value = getattr(body, name)
        if value is not None and not least <= value <= most:
            check_range(body, name, least, most)
    only_echoes = isinstance(body, CompletionBody) and body.echo and not body.stream
    check_range(body, "max_tokens", 0 if only_echoes else 1, MOST_TOKENS)
    if isinstance(body, ChatBody):
        check_range(body, "max_completion_tokens", 1, MOST_TOKENS)


def ending_of(body: GenerationBody, card: ModelCard) -> Ending:
    """Returns the rules that end the output. Raises ApiError for too many stop strings, for an
    empty or too long one, and for a stop token out of the vocabulary."""
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > MOST_STOPS:
        raise ApiError(f"'stop' may hold at most {MOST_STOPS} strings.", param="stop")
    for stop in stops:
        if not 0 < len(stop) <= LONGEST_STOP_CHARS:
            text = f"A stop string must have 1 to {LONGEST_STOP_CHARS} characters."
            raise ApiError(text, param="stop")
    stop_ids = frozenset(body.stop_token_ids or ())
    check_token_ids(list(stop_ids), card.vocab_size, "stop_token_ids")
    include_stop = bool(body.include_stop_str_in_output)
    silent = set() if include_stop else set(stop_ids)
    if not body.ignore_eos:
        silent.update(card.eos_token_ids)
    return Ending(
        stops=stops,
        include_stop=include_stop,
        stop_token_ids=stop_ids,
        silent_token_ids=frozenset(silent),
        min_tokens=body.min_tokens or 0,
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def sampling_of(
    body: ChatBody | CompletionBody,
    ending: Ending,
    grammar: str,
    max_tokens: int,
    seed: int,
    card: ModelCard,
    bad_words: tuple[BadWord, ...] = (),
) -> SamplingParams:
    def wanted(name: str, otherwise: float) -> float:
        """Returns the request's value, else the model's default, else the neutral value."""
        value: float | None = getattr(body, name)
        return card.sampling.get(name, otherwise) if value is None else value

    vocab_size = card.vocab_size
    top_p = wanted("top_p", 1.0)
    top_k = max(int(wanted("top_k", 0)), 0)
    if top_p == 0.0:  # OpenAI allows 0: only the most likely token remains
        top_p, top_k = 1.0, 1
    return SamplingParams(
        temperature=wanted("temperature", 1.0),
        top_p=top_p,
        top_k=top_k if top_k < vocab_size else 0,
        min_p=wanted("min_p", 0.0),
        seed=seed % _SEED_MODULUS,
        max_tokens=max_tokens,
        min_tokens=ending.min_tokens,
        ignore_eos=bool(body.ignore_eos),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=wanted("repetition_penalty", 1.0),
        stop_token_ids=tuple(sorted(ending.stop_token_ids)),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        logprobs=num_logprobs(body),
        prompt_logprobs=num_prompt_logprobs(body),
        grammar=grammar,
        allowed_token_ids=_token_list(body, "allowed_token_ids", MOST_ALLOWED, vocab_size),
        bad_words=bad_words,
        logprob_token_ids=_token_list(body, "logprob_token_ids", MOST_LISTED, vocab_size),
    )


def _token_list(body: GenerationBody, name: str, most: int, vocab_size: int) -> tuple[int, ...]:
    """Returns the token ids of a field without repetitions, or none if the field is absent."""
    given: list[int] | None = getattr(body, name)
    if given is None:
        return ()
    if not 0 < len(given) <= most:
        raise ApiError(f"'{name}' must hold 1 to {most} token ids.", param=name)
    check_token_ids(given, vocab_size, name)
    return tuple(dict.fromkeys(given))


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Returns the biases, ordered by token id. The keys of a JSON object are strings, so ids are
    parsed."""
    if len(biases) > MOST_BIASES:
        raise ApiError(f"'logit_bias' may hold at most {MOST_BIASES} tokens.", param="logit_bias")
    read: dict[int, float] = {}
    for name, bias in biases.items():
        if not name.isdecimal() or len(name) > 10:
            text = f"'logit_bias' maps token ids to numbers; {name[:40]!r} is not a token id."
            raise ApiError(text, param="logit_bias")
        if not -LARGEST_BIAS <= bias <= LARGEST_BIAS:
            text = (
                f"Invalid value for 'logit_bias': {_short(bias)}. "
                f"It must be between {-LARGEST_BIAS} and {LARGEST_BIAS}."
            )
            raise ApiError(text, param="logit_bias")
        read[int(name)] = bias
    check_token_ids(list(read), vocab_size, "logit_bias")
    return tuple(sorted(read.items()))


def num_logprobs(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    return (body.top_logprobs or 0) if body.logprobs else None


def num_prompt_logprobs(body: ChatBody | CompletionBody) -> int | None:
    """Returns how many likely tokens are wanted at each token of the prompt; None means no
    logprobs."""
    wanted = [body.prompt_logprobs]
    if isinstance(body, CompletionBody) and body.echo:
        wanted.append(body.logprobs)
    return max((count for count in wanted if count is not None), default=None)


def check_prompt_logprobs(body: ChatBody | CompletionBody, most: int, supported: bool) -> None:
    """Checks logprobs of the prompt, at most `most` per token. Raises ApiError for more, without
    support of the engine, and for a stream."""
    check_range(body, "prompt_logprobs", 0, most)
    if num_prompt_logprobs(body) is None:
        return
    param = "echo" if body.prompt_logprobs is None else "prompt_logprobs"
    if not supported:
        text = (
            "The engine of this server does not compute logprobs of the prompt. Leave"
            " 'prompt_logprobs' out, and 'echo' together with 'logprobs'."
        )
        raise ApiError(text, param=param, code="unsupported_parameter")
    if body.stream:
        text = "Logprobs of the prompt are not streamed. Leave 'stream' out."
        raise ApiError(text, param=param, code="unsupported_parameter")


def check_logprobs(body: ChatBody | CompletionBody, most: int) -> None:
    """Raises ApiError for more than `most` logprobs per token, and for `top_logprobs` or
    `logprob_token_ids` without `logprobs`."""
    if body.logprob_token_ids is not None and num_logprobs(body) is None:
        text = "'logprob_token_ids' is only allowed together with 'logprobs'."
        raise ApiError(text, param="logprob_token_ids")
    if isinstance(body, CompletionBody):
        check_range(body, "logprobs", 0, most)
        return
    check_range(body, "top_logprobs", 0, most)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs"
        )


def max_tokens_of(
    body: ChatBody | CompletionBody,
    num_prompt_tokens: int,
    most: int,
    usual: float | None = None,
    strict: bool = False,
) -> int:
    """Returns the limit on output tokens. A limit beyond the room in the context is lowered to that
    room, as in vLLM. Raises `ApiError` if there is no room, or if the limit is too high and
    `strict` is set.

    `most`: most tokens of prompt and output. `usual`: the model's own limit for chats that set no
    limit."""
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    left = most - num_prompt_tokens
    if left < 1:
        raise context_exceeded(num_prompt_tokens, most, param)
    max_tokens = body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
    if max_tokens is None:
        if isinstance(body, CompletionBody):
            usual = _DEFAULT_COMPLETION_TOKENS
        max_tokens = left if usual is None else min(left, int(usual))
    elif max_tokens > left and strict:
        raise ApiError(
            f"This model's maximum context length is {most} tokens. However, you requested "
            f"{num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the {param}, "
            f"{max_tokens} in the completion). Please reduce the length of the {param} or "
            "completion.",
            param=param,
            code="context_length_exceeded",
        )
    # the engine must draw at least 1 token, which `hide_output` drops
    max_tokens = min(max(max_tokens, 1), left)
    if (body.min_tokens or 0) > max_tokens:
        text = f"'min_tokens' must be at most 'max_tokens' ({max_tokens})."
        raise ApiError(text, param="min_tokens")
    return max_tokens


def context_exceeded(num_prompt_tokens: int | None, most: int, param: str) -> ApiError:
    """Makes the error of a prompt that leaves no room in a context of `most` tokens. The number of
    tokens is None for a prompt that was too long to count."""
    had = "far more" if num_prompt_tokens is None else f"{num_prompt_tokens} tokens"
    return ApiError(
        f"This model's maximum context length is {most} tokens for prompt and output together. "
        f"However, your prompt has {had}. Please reduce the length of the {param}.",
        param=param,
        code="context_length_exceeded",
    )


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises ApiError, which names `param`, for an id outside [0, vocab_size)."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        text = f"Token id {_short(bad)} is out of vocabulary (0 to {vocab_size - 1})."
        raise ApiError(text, param=param)
