"""Tests structured output: the allowed tokens depend only on the tokens before, and every sampled
answer matches its grammar."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import models as bpe
from tokenizers import pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

from moonpool.api.bodies import CompletionBody as Body
from moonpool.api.bodies import ResponseFormat, StructuredOutputs
from moonpool.api.structured_output import grammar_of
from moonpool.text.grammar import MAX_KEPT, Grammars, matches_grammar
from moonpool.text.tokenizers.byte import EOS_ID, ByteTokenizer
from moonpool.text.tokenizers.huggingface import HfTokenizer
from moonpool.types import SamplingParams
from moonpool_engine.engine.sampler import Draw, sample

VOCAB = 300
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog", "größe"]},
        "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}


def schema_grammar(schema: dict[str, Any]) -> str:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return grammar_of(Body(response_format=as_format(wanted)), can_end=True)[1]


def as_format(wanted: dict[str, Any]) -> ResponseFormat:
    return msgspec.convert(wanted, ResponseFormat)


def byte_grammars() -> Grammars:
    return Grammars(partial(ByteTokenizer, VOCAB), VOCAB, (EOS_ID, VOCAB + 5))


def answer(grammars: Sequence[Grammars], grammar: str, seed: int, most: int = 400) -> list[int]:
    """Samples from random logits, each token with the next of `grammars`."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=1.0, seed=seed, grammar=grammar)
    generated: list[int] = []
    while len(generated) < most:
        logits = torch.from_numpy(rng.normal(0, 4, (1, VOCAB)).astype(np.float32))
        draw = Draw(params, tuple(generated), (EOS_ID,))
        place = len(generated)
        ((token,),) = sample(logits, [draw], [place], grammars[place % len(grammars)])
        if token.token_id == EOS_ID:
            break
        generated.append(token.token_id)
    return generated


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_any_draws_make_what_the_schema_says(seed: int) -> None:
    tokens = answer([byte_grammars()], schema_grammar(SCHEMA), seed)
    found = json.loads(ByteTokenizer(VOCAB).decode(tokens))
    assert found.keys() == {"name", "kind", "ages"}
    assert len(found["name"]) <= 6 and found["kind"] in SCHEMA["properties"]["kind"]["enum"]
    assert len(found["ages"]) <= 2 and all(isinstance(age, int) for age in found["ages"])


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_every_instance_allows_the_same_tokens(seed: int) -> None:
    """Answers must match although prefill and decode instances draw alternately, and another
    instance draws after a fault."""
    grammar = schema_grammar(SCHEMA)
    one, two = byte_grammars(), byte_grammars()
    assert answer([one], grammar, seed) == answer([one, two, byte_grammars()], grammar, seed)


def test_choices_and_regular_expressions_are_kept() -> None:
    choices = ["yes", "no", 'a "quoted" \\ one\n', "ähnlich"]
    wanted = Body(structured_outputs=StructuredOutputs(choice=choices))
    grammar, text = grammar_of(wanted, can_end=True)[1], ByteTokenizer(VOCAB)
    seen = {text.decode(answer([byte_grammars()], grammar, seed)) for seed in range(40)}
    assert seen == set(choices)
    wanted = Body(structured_outputs=StructuredOutputs(regex=r"\d{3}-[a-f]{2,4}"))
    _, grammar = grammar_of(wanted, can_end=True)
    for seed in range(10):
        assert re.fullmatch(
            r"\d{3}-[a-f]{2,4}", text.decode(answer([byte_grammars()], grammar, seed))
        )


def test_the_end_is_allowed_where_the_form_is_complete_and_only_there() -> None:
    grammars, grammar = byte_grammars(), LLMatcher.grammar_from_regex("ab?")
    masks = [grammars.allowed(grammar, tokens) for tokens in ([], [97])]
    assert np.flatnonzero(masks[0]).tolist() == [97]
    assert np.flatnonzero(masks[1]).tolist() == [98, EOS_ID]
    assert np.flatnonzero(grammars.allowed(grammar, [97, 98])).tolist() == [EOS_ID]


def test_a_form_that_cannot_be_followed_ends_the_answer() -> None:
    grammars, grammar = byte_grammars(), LLMatcher.grammar_from_regex("ab?")
    assert np.flatnonzero(grammars.allowed(grammar, [120])).tolist() == [EOS_ID]


def test_an_ambiguous_grammar_is_given_up_before_it_costs_much(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grammars = byte_grammars()
    grammar = LLMatcher.grammar_from_lark('start: a\na: a a | "x" | a a a')
    generated: list[int] = []
    while not caplog.records:
        mask = grammars.allowed(grammar, generated)
        assert len(generated) < 400 and mask[EOS_ID] == bool(generated)
        generated.append(ord("x"))
    assert "cannot be followed" in caplog.text and "\n" not in caplog.records[0].getMessage()
    assert not matches_grammar(grammar, "x" * len(generated)) and matches_grammar(grammar, "xxx")


def test_more_answers_than_are_kept_are_still_right() -> None:
    grammars = byte_grammars()
    forms = [LLMatcher.grammar_from_regex(f"x{i}") for i in range(MAX_KEPT + 20)]
    for form in forms:
        grammars.allowed(form, [])
    for i, form in enumerate(forms):
        (allowed,) = np.flatnonzero(grammars.allowed(form, [120]))
        assert allowed == ord(str(i)[0])


@pytest.mark.long
def test_drafts_are_drawn_under_the_grammar_one_by_one() -> None:
    """The matcher must follow the right drafts, and ignore the wrong ones."""
    grammar = schema_grammar({"enum": ["abcabc", "abcabd", "xyz"]})
    rng, num_further = np.random.default_rng(4), 0
    for seed in range(40):
        rows = torch.from_numpy(rng.normal(0, 4, (12, VOCAB)).astype(np.float32))
        params = SamplingParams(temperature=1.0, seed=seed, grammar=grammar)
        plain: list[int] = []
        while len(plain) < 9:
            draw = Draw(params, tuple(plain), (EOS_ID,))
            ((token,),) = sample(rows[[len(plain)]], [draw], [len(plain)], byte_grammars())
            if token.token_id == EOS_ID:
                break
            plain.append(token.token_id)
        grammars, found = byte_grammars(), list[int]()
        while len(found) < len(plain):
            done = len(found)
            drafts = plain[done : done + 3]
            if seed % 3 and len(drafts) > 1:
                drafts[1] = ord("Q")
            draw = Draw(params, tuple(found), (EOS_ID,), drafts=drafts)
            (tokens,) = sample(rows[done : done + 1 + len(drafts)], [draw], [done], grammars)
            new = [token.token_id for token in tokens if token.token_id != EOS_ID]
            num_further += len(new) - 1
            found += new
        assert found == plain
    assert num_further > 40


def test_other_rows_of_the_batch_are_not_touched() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 200] = 9.0
    form = SamplingParams(temperature=0.0, grammar=LLMatcher.grammar_from_regex("a"))
    draws = [Draw(form, (), (EOS_ID,)), Draw(SamplingParams(temperature=0.0), (), (EOS_ID,))]
    tokens = sample(logits, draws, [0, 0], byte_grammars())
    assert [token.token_id for (token,) in tokens] == [97, 200]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a byte-level BPE tokenizer that was trained on JSON, with special tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(bpe.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevel()
    rng = random.Random(1)
    texts = [json.dumps({"name": rng.choice(["ann", "bob"]), "n": i}) for i in range(500)]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(texts, trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


def test_tokens_of_several_bytes_and_specials(folder: Path) -> None:
    tokenizer = HfTokenizer(folder)
    (end,) = tokenizer.eos_token_ids
    size = tokenizer.vocab_size + 7  # larger than the vocabulary, because models pad theirs
    grammars = Grammars(partial(HfTokenizer, folder), size, (end,))
    grammar = schema_grammar({"type": "object", "properties": {"name": {"type": "string"}}})
    for seed in range(20):
        rng = np.random.default_rng(seed)
        params = SamplingParams(temperature=1.0, seed=seed, grammar=grammar)
        generated: list[int] = []
        while len(generated) < 60:
            logits = torch.from_numpy(rng.normal(0, 3, (1, size)).astype(np.float32))
            # makes the closing quote likelier, so that texts end
            logits[0, tokenizer.encode('"}')[0]] += 8
            draw = Draw(params, tuple(generated), (end,))
            ((token,),) = sample(logits, [draw], [len(generated)], grammars)
            if token.token_id == end:
                json.loads(tokenizer.decode(generated))
                break
            generated.append(token.token_id)
        assert not tokenizer.special_token_ids.intersection(generated)
        assert all(token_id < tokenizer.vocab_size for token_id in generated)


def test_a_model_that_cannot_end_an_answer_boots_all_the_same(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    tokenizer = HfTokenizer(tmp_path)
    assert tokenizer.eos_token_ids == ()
    for ends in ((), (tokenizer.vocab_size + 1,)):
        Grammars(partial(HfTokenizer, tmp_path), tokenizer.vocab_size, ends).prepare()
