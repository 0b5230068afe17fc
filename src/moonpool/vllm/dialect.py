"""Requests for vLLM's `/v1/completions`, and the parsing of its responses.

Prompts and outputs are token ids (`return_token_ids`), so that both sides have the same tokens. The
head converts token ids to and from text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moonpool.protocol.messages import AttemptSpec
from moonpool.types import MALFORMED, FinishReason, SamplingParams, Token, TokenLogprobs
from moonpool.vllm.actions import EngineOutput, SubmitRequest
from moonpool.vllm.block_names import salt_of

_TOKEN_PREFIX = "token_id:"  # noqa: S105 - of `return_tokens_as_token_ids`
_SEED_MASK = (1 << 63) - 1
_GREEDY_BELOW = 1e-5
"""vLLM draws at 0.01 for every temperature below 0.01 except 0. Below this value, greedy is nearer,
so 0 is sent."""


class DialectError(ValueError):
    """A response of vLLM cannot be used; one line says why. `refused`: whether the server refused
    the call, so that a retry would not help."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused
        self.status = 0


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _PromptLogprob(msgspec.Struct):
    logprob: float | None = None
    rank: int | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []
    kv_transfer_params: dict[str, Any] | None = None
    error: Any = None


REFUSALS = (400, 413, 422)
"""HTTP statuses that mean that the request is at fault."""
_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_COMPLETION = msgspec.json.Decoder(_Completion)
_encode = msgspec.json.encode


def most_new_tokens(work: AttemptSpec, context: int) -> int:
    """Returns the remaining length of the answer in tokens, at least 1, as far as a server with
    this context can compute it. If the server cannot compute all of it, the answer continues on
    another one."""
    left = work.sampling.max_tokens - (len(work.token_ids) - work.num_prompt_tokens)
    return max(min(left, context - len(work.token_ids)), 1)


def completion_body(
    submit: SubmitRequest, model_id: str, context: int, layout_fingerprint: bytes
) -> bytes:
    """Returns the body of the request for one attempt.

    Tokens generated before a fault are part of the prompt. The request then has another seed, so
    later draws are as random but not the same. Raises DialectError.
    """
    work, sampling = submit.attempt, submit.attempt.sampling
    num_done = len(work.token_ids) - work.num_prompt_tokens
    if sampling.grammar and num_done:
        raise DialectError(
            "structured output cannot continue after a fault; send the request again"
        )
    if _begins_bad_word(work.token_ids[work.num_prompt_tokens :], sampling):
        raise DialectError(
            "an answer whose last tokens may begin one of its bad words cannot continue after a "
            "fault; send the request again"
        )
    most = 1 if submit.hands_over else most_new_tokens(work, context)
    body: dict[str, Any] = {
        "model": work.adapter or model_id,
        "prompt": list(work.token_ids),
        "stream": is_streamed(submit),
        "return_token_ids": True,
        "max_tokens": most,
        "min_tokens": min(max(sampling.min_tokens - num_done, 0), most),
        "temperature": 0.0 if sampling.temperature < _GREEDY_BELOW else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": (sampling.seed + num_done) & _SEED_MASK,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
        "add_special_tokens": False,
        "skip_special_tokens": False,
    }
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.logprobs is not None:
        body["logprobs"] = sampling.logprobs
        body["return_tokens_as_token_ids"] = True
        if sampling.logprob_token_ids:
            body["logprob_token_ids"] = list(sampling.logprob_token_ids)
    if sampling.allowed_token_ids:
        body["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.bad_words:
        body["bad_words"] = [word.text for word in sampling.bad_words]
    if sampling.prompt_logprobs is not None and not submit.handle:
        body["prompt_logprobs"] = sampling.prompt_logprobs
    if sampling.grammar:
        body["structured_outputs"] = structured_outputs(sampling.grammar)
    body |= _cache_fields(submit, layout_fingerprint)
    return _encode(body)


def _cache_fields(submit: SubmitRequest, layout_fingerprint: bytes) -> dict[str, Any]:
    """Returns the fields that say whose blocks the request may share, and to or from which server
    its KVCache is sent."""
    work, body = submit.attempt, dict[str, Any]()
    salt = salt_of(layout_fingerprint, work.tenant, work.adapter, submit.has_pool)
    if not work.use_cache:
        salt = hashlib.sha256(work.attempt_id.encode()).hexdigest()
    if salt is not None:
        body["cache_salt"] = salt
    if submit.hands_over:
        body["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    elif submit.handle:
        body["kv_transfer_params"] = msgspec.json.decode(submit.handle)
    return body


def is_streamed(submit: SubmitRequest) -> bool:
    """Whether a completion is streamed; vLLM does not stream the log-probabilities of a prompt."""
    return not submit.hands_over and submit.attempt.sampling.prompt_logprobs is None


def _begins_bad_word(generated: Sequence[int], sampling: SamplingParams) -> bool:
    """Whether an answer continues within a bad word: vLLM only looks for bad words in its own
    tokens."""
    done = tuple(generated)
    return any(
        done[-length:] == token_ids[:length]
        for word in sampling.bad_words
        for token_ids in word.token_ids
        for length in range(1, min(len(token_ids), len(done) + 1))
    )


def structured_outputs(grammar: str) -> dict[str, Any]:
    """Converts a grammar of llguidance (see `api.structured_output`) to vLLM's field.

    A Lark grammar stays unchanged; a JSON schema or a regular expression is taken out of
    llguidance's form. vLLM itself lets a model reason first, if it was started with a reasoning
    parser.
    """
    if not grammar.startswith("{"):
        return {"grammar": grammar}
    form = msgspec.json.decode(grammar)["grammars"][0]
    if form.get("json_schema") is not None:
        return {"json": form["json_schema"]}
    lark = form.get("lark_grammar")
    if form.get("name") == "regex" and lark.startswith("start: /"):
        return {"regex": lark[len("start: /") : -1].replace("\\/", "/")}
    return {"grammar": lark}


def read_output(work: AttemptSpec, event: bytes) -> EngineOutput:
    """Parses one event of a streamed completion, or a whole one. Raises `DialectError`."""
    try:
        found = _COMPLETION.decode(event)
    except MALFORMED as error:
        raise DialectError(f"its response does not have vLLM's format: {error}") from None
    if found.error is not None:
        shown = found.error if isinstance(found.error, dict) else {"message": found.error}
        why = " ".join(str(shown.get("message")).split())[:300]
        raise DialectError(why, refused=shown.get("code") in REFUSALS)
    if not found.choices:
        return EngineOutput(work.attempt_id, ())
    choice = found.choices[0]
    if choice.token_ids is None and choice.text:
        raise DialectError("it returns no token ids: moonpool needs vLLM 0.10.2 or newer")
    handle = b"" if found.kv_transfer_params is None else _encode(found.kv_transfer_params)
    tokens = _tokens(work, choice)
    prompt = _prompt(work, choice)
    if tokens and prompt is not None:
        tokens = (msgspec.structs.replace(tokens[0], prompt=prompt), *tokens[1:])
    return EngineOutput(work.attempt_id, tokens, _finish(choice.finish_reason), handle)


def _tokens(work: AttemptSpec, choice: _Choice) -> tuple[Token, ...]:
    ids = choice.token_ids or []
    most, logprobs = work.sampling.logprobs, choice.logprobs
    if most is None or logprobs is None:
        return tuple(Token(token_id=i) for i in ids)
    if len(logprobs.token_logprobs) != len(ids):
        raise DialectError("its log-probabilities do not match its tokens")
    tops = logprobs.top_logprobs or [None] * len(ids)
    listed = work.sampling.logprob_token_ids
    tokens = []
    for i, logprob, top in zip(ids, logprobs.token_logprobs, tops, strict=True):
        found = _top(top, most, (i, *listed) if listed else ())
        tokens.append(Token(token_id=i, logprobs=TokenLogprobs(logprob=_least(logprob), top=found)))
    return tuple(tokens)


def _prompt(work: AttemptSpec, choice: _Choice) -> tuple[TokenLogprobs, ...] | None:
    """Returns the log-probabilities of the prompt's tokens but the first, if they are wanted."""
    most, found = work.sampling.prompt_logprobs, choice.prompt_logprobs
    if most is None or found is None:
        return None
    tokens = work.token_ids[1:]
    if len(found) != len(tokens) + 1:
        raise DialectError("its log-probabilities do not match the prompt")
    return tuple(
        _of_prompt_token(token_id, listed or {}, most)
        for token_id, listed in zip(tokens, found[1:], strict=True)
    )


def _of_prompt_token(
    token_id: int, listed: Mapping[str, _PromptLogprob], most: int
) -> TokenLogprobs:
    """Returns the log-probabilities of one token of the prompt, with at most `most` likely tokens.
    vLLM also lists the prompt's own token, whatever its rank."""
    own = listed.get(str(token_id))
    if own is None:
        raise DialectError("its log-probabilities do not match the prompt")
    likely = sorted(
        (one.rank or 0, int(name), _least(one.logprob))
        for name, one in listed.items()
        if name.isdigit() and (one.rank or 0) <= most
    )
    top = tuple((found_id, logprob) for _, found_id, logprob in likely[:most])
    return TokenLogprobs(logprob=_least(own.logprob), top=top)


def _least(logprob: float | None) -> float:
    return -9999.0 if logprob is None else logprob  # vLLM sends null for minus infinity


def _top(
    top: Mapping[str, float] | None, most: int, listed: Sequence[int] = ()
) -> tuple[tuple[int, float], ...]:
    """Returns the `most` likeliest tokens, the likeliest first, or only the `listed` tokens, in
    their order. vLLM may also list the drawn token."""
    found: dict[int, float] = {}
    for name, logprob in (top or {}).items():
        number = name.removeprefix(_TOKEN_PREFIX)
        if number.isdigit():
            found[int(number)] = logprob
    if listed:
        return tuple((i, found[i]) for i in dict.fromkeys(listed) if i in found)
    return tuple(sorted(found.items(), key=lambda pair: -pair[1])[:most])


def _finish(reason: str | None) -> FinishReason | None:
    if reason is None:
        return None
    # other reasons are, for example, abort, or error if no KVCache could be fetched
    if reason not in _FINISHES:
        raise DialectError(f"it ended the output early ({reason[:50]})")
    return _FINISHES[reason]
