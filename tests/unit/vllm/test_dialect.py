"""Tests vLLM's formats: requests in the form that vLLM reads, answers and facts in the form that it
sends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from moonpool.protocol.block_layout import root_key
from moonpool.protocol.messages import AttemptId, AttemptSpec
from moonpool.types import BadWord, FinishReason, SamplingParams, Slo
from moonpool.vllm.actions import EngineOutput, SubmitRequest
from moonpool.vllm.dialect import DialectError, completion_body, read_output

FINGERPRINT = b"layout"


def work(sampling: SamplingParams | None = None, done: int = 0, **others: Any) -> AttemptSpec:
    values: dict[str, Any] = {
        "attempt_id": AttemptId("w"),
        "token_ids": (5, 6, 7, *range(done)),
        "num_prompt_tokens": 3,
        "sampling": sampling or SamplingParams(),
        "slo": Slo(ttft_s=1.0, tbt_s=1.0),
        "tenant": "",
        "use_cache": True,
        "timeout_s": 10.0,
    }
    return AttemptSpec(**(values | others))


def body(ask: SubmitRequest) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(completion_body(ask, "m", 1000, FINGERPRINT))
    return decoded


def test_every_way_to_draw_is_passed_on() -> None:
    sampling = SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=11,
        max_tokens=20,
        min_tokens=4,
        ignore_eos=True,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        stop_token_ids=(9,),
        logit_bias=((3, -2.0),),
        logprobs=2,
        logprob_token_ids=(8, 4),
        allowed_token_ids=(1, 2),
        bad_words=(BadWord("no", ((7,), (3, 4))),),
    )
    sent = body(SubmitRequest(work(sampling)))
    lists = {"logprob_token_ids": [8, 4], "allowed_token_ids": [1, 2], "bad_words": ["no"]}
    special = {"logit_bias": {"3": -2.0}, "stop_token_ids": [9], **lists}
    for name in set(SamplingParams.__struct_fields__) - {"grammar", "prompt_logprobs", "pooling"}:
        assert sent[name] == special.get(name, getattr(sampling, name)), name
    assert sent["prompt"] == [5, 6, 7]
    assert sent["return_token_ids"] is True
    assert sent["return_tokens_as_token_ids"] is True
    assert "cache_salt" not in sent


@pytest.mark.parametrize(("given", "sent"), [(5e-324, 0.0), (9e-6, 0.0), (1e-5, 1e-5), (2.0, 2.0)])
def test_a_temperature_near_0_is_greedy(given: float, sent: float) -> None:
    assert body(SubmitRequest(work(SamplingParams(temperature=given))))["temperature"] == sent


def test_an_answer_within_a_bad_word_does_not_continue_after_a_fault() -> None:
    """After a fault, the server would look for bad words only in the tokens of the new request,
    because vLLM searches each request alone."""
    sampling = SamplingParams(bad_words=(BadWord("no", ((7,), (1, 2, 9))),))
    for done in (0, 1, 2):  # the answer so far is (), (0,) or (0, 1)
        asked = SubmitRequest(work(sampling, done=done))
        if done < 2:
            assert body(asked)["bad_words"] == ["no"]
        else:
            with pytest.raises(DialectError, match="bad words"):
                body(asked)
    with pytest.raises(DialectError, match="bad words"):
        body(SubmitRequest(work(sampling, done=3)))
    assert body(SubmitRequest(work(sampling, done=4)))["bad_words"] == ["no"]


def test_logprobs_of_listed_tokens_follow_the_drawn_one_in_the_order_of_the_list() -> None:
    choice = {
        "token_ids": [5],
        "logprobs": {
            "tokens": ["token_id:5"],
            "token_logprobs": [-1.0],
            "top_logprobs": [{"token_id:8": -3.0, "token_id:5": -1.0, "token_id:4": -0.5}],
        },
    }
    asked = work(SamplingParams(logprobs=1, logprob_token_ids=(8, 4)))
    (token,) = read_output(asked, json.dumps({"choices": [choice]}).encode()).tokens
    assert token.logprobs is not None and token.logprobs.top == ((5, -1.0), (8, -3.0), (4, -0.5))


def test_what_was_generated_before_a_fault_is_not_generated_again() -> None:
    sampling = SamplingParams(max_tokens=20, min_tokens=4, seed=11)
    sent = body(SubmitRequest(work(sampling, done=5)))
    assert (sent["max_tokens"], sent["min_tokens"], sent["seed"]) == (15, 0, 16)
    assert len(sent["prompt"]) == 8


@given(st.integers(0, 2**64 - 1))
def test_seeds_fit_its_64_bits_with_a_sign(seed: int) -> None:
    assert 0 <= body(SubmitRequest(work(SamplingParams(seed=seed))))["seed"] < 2**63


def test_tenants_and_those_who_want_no_cache_are_kept_apart() -> None:
    salted = body(SubmitRequest(work(tenant="key0")))["cache_salt"]
    assert salted == root_key(FINGERPRINT, "key0").hex()
    alone = body(SubmitRequest(work(use_cache=False)))["cache_salt"]
    other = body(SubmitRequest(work(use_cache=False, attempt_id=AttemptId("x"))))["cache_salt"]
    assert len({salted, alone, other}) == 3
    assert all(len(salt) <= 128 and salt.isalnum() for salt in (salted, alone, other))


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (LLMatcher.grammar_from_regex(r"a/b\d+"), {"regex": r"a/b\d+"}),
        (LLMatcher.grammar_from_lark('start: "a" | "b"'), {"grammar": 'start: "a" | "b"'}),
        (LLMatcher.grammar_from_json_schema({"type": "object"}), {"json": {"type": "object"}}),
        ('{"grammars":[{"lark_grammar":"start: \\"a\\""}]}', {"grammar": 'start: "a"'}),
    ],
)
def test_forms_are_said_in_its_words(grammar: str, expected: dict[str, Any]) -> None:
    sent = body(SubmitRequest(work(SamplingParams(grammar=grammar))))["structured_outputs"]
    if "json" in sent:
        sent["json"].pop("x-guidance", None)
    assert sent == expected


def test_a_form_does_not_go_on_elsewhere() -> None:
    grammar = LLMatcher.grammar_from_regex("[ab]+")
    with pytest.raises(DialectError, match="after a fault"):
        body(SubmitRequest(work(SamplingParams(grammar=grammar), done=2)))


def test_what_it_refuses_is_told_from_what_it_fails_at() -> None:
    for code, refused in ((400, True), (500, False)):
        event = json.dumps({"error": {"message": "no", "code": code}}).encode()
        with pytest.raises(DialectError) as raised:
            read_output(work(), event)
        assert raised.value.refused is refused


def test_a_prefill_is_one_token_and_asks_to_keep_the_kvcache() -> None:
    sent = body(SubmitRequest(work(SamplingParams(max_tokens=9, min_tokens=3)), hands_over=True))
    assert (sent["stream"], sent["max_tokens"], sent["min_tokens"]) == (False, 1, 1)
    assert sent["kv_transfer_params"]["do_remote_decode"] is True


def test_a_handle_comes_back_as_it_was_given() -> None:
    told = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_port": 5600}
    event = {"choices": [{"token_ids": [4], "finish_reason": "length"}], "kv_transfer_params": told}
    piece = read_output(work(), json.dumps(event).encode())
    assert body(SubmitRequest(work(), handle=piece.handle))["kv_transfer_params"] == told


def test_pieces_of_an_answer() -> None:
    said = b'{"id":"x","choices":[{"index":0,"text":"a","token_ids":[4,5],"finish_reason":null}]}'
    piece = read_output(work(), said)
    assert [t.token_id for t in piece.tokens] == [4, 5]
    assert piece.finish is None
    last = read_output(work(), b'{"choices":[{"token_ids":[1],"finish_reason":"stop"}]}')
    assert last.finish is FinishReason.STOP
    usage = read_output(work(), b'{"choices":[],"usage":{"prompt_tokens":3}}')
    assert usage.tokens == ()
    assert usage.finish is None


def test_log_probabilities_go_to_their_tokens_the_likeliest_first() -> None:
    told = {
        "tokens": ["token_id:4", "token_id:5"],
        "token_logprobs": [-1.5, None],
        "top_logprobs": [
            {"token_id:4": -1.5, "token_id:8": -0.5, "token_id:9": -0.7},
            None,
        ],
    }
    event = {"choices": [{"token_ids": [4, 5], "finish_reason": None, "logprobs": told}]}
    first, second = read_output(work(SamplingParams(logprobs=2)), json.dumps(event).encode()).tokens
    assert first.logprobs is not None
    assert first.logprobs.logprob == -1.5
    assert first.logprobs.top == ((8, -0.5), (9, -0.7))
    assert second.logprobs is not None
    assert second.logprobs.top == ()


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (b"{}x", "does not have vLLM's format"),
        (b'{"choices":[{"text":"a"}]}', "0.10.2"),
        (b'{"error":{"message":"no room"}}', "no room"),
        (b'{"choices":[{"token_ids":[],"finish_reason":"abort"}]}', "ended the output early"),
        (b'{"choices":[{"token_ids":[],"finish_reason":"error"}]}', "ended the output early"),
        (b'{"choices":[{"token_ids":["a"]}]}', "does not have vLLM's format"),
    ],
)
def test_what_is_no_answer_is_one_line(event: bytes, says: str) -> None:
    with pytest.raises(DialectError, match=says) as raised:
        read_output(work(), event)
    assert "\n" not in str(raised.value)


def test_an_adapter_is_the_model_and_has_a_salt_of_its_own() -> None:
    plain, adapted = (body(SubmitRequest(work(adapter=name))) for name in ("", "poet"))
    assert plain["model"] == "m" and "cache_salt" not in plain
    assert adapted["model"] == "poet" and adapted["cache_salt"]


def scored(found: Any, wanted: int = 1) -> EngineOutput:
    event = {"choices": [{"token_ids": [4], "finish_reason": "length", "prompt_logprobs": found}]}
    asked = work(SamplingParams(prompt_logprobs=wanted))
    return read_output(asked, json.dumps(event).encode())


def test_scores_of_the_prompt_come_with_the_first_token() -> None:
    prompt = work().token_ids
    listed = [None] + [
        {str(token): {"logprob": -2.5, "rank": 7}, "9000": {"logprob": -0.5, "rank": 1}}
        for token in prompt[1:]
    ]
    (token,) = scored(listed).tokens
    assert token.prompt is not None
    assert [one.logprob for one in token.prompt] == [-2.5] * (len(prompt) - 1)
    assert {one.top for one in token.prompt} == {((9000, -0.5),)}
    (plain,) = scored(listed, wanted=0).tokens
    assert plain.prompt is not None
    assert {one.top for one in plain.prompt} == {()}


def test_scores_that_do_not_fit_the_prompt_are_one_line() -> None:
    prompt = work().token_ids
    for strange in ([None], [None] + [{"1": {"logprob": -1.0}}] * (len(prompt) - 1)):
        with pytest.raises(DialectError, match="do not match the prompt"):
            scored(strange)


def test_scores_of_the_prompt_are_asked_for_whole_and_only_where_it_is_computed() -> None:
    asked = SubmitRequest(work(SamplingParams(prompt_logprobs=2)))
    assert body(asked)["prompt_logprobs"] == 2
    assert body(asked)["stream"] is False
    decode = SubmitRequest(work(SamplingParams(prompt_logprobs=2)), handle=b"{}")
    assert "prompt_logprobs" not in body(decode)
