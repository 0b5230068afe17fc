"""Tests a trained model: SmolLM2-135M-Instruct in Q4_1, from the package of the extra `smollm2`."""

from __future__ import annotations

import pytest
import torch

from moonpool.text.model_error import ModelError
from moonpool.text.tokenizer import Tokenizer
from moonpool_engine.engine import native
from moonpool_engine.engine.builtin import LoadedModel, open_model, open_tokenizer
from moonpool_engine.engine.gguf.files import gguf_file
from tests.differential.plans import Lab, make_ops

# The tokens were made with the tokenizer of HuggingFaceTB/SmolLM2-135M-Instruct's kind in
# transformers 5.23.0.
WORDS = {
    "Hello 1234 wörld, it's 3.14!\n\n def f(x):": [
        19556, 216, 33, 34, 35, 36, 267, 29989, 400, 28, 357, 506, 216, 35, 30, 33, 36, 17, 1116,
        753, 275, 24, 104, 727,
    ],
    "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    try:
        gguf_file("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    if native.available() is not None:
        pytest.skip(str(native.available()))
    return open_model("smollm2", "float32")


@pytest.fixture(scope="module")
def tokenizer(model: LoadedModel) -> Tokenizer:
    return open_tokenizer(model.tokenizer, model.spec.vocab_size)


def test_words(tokenizer: Tokenizer) -> None:
    for text, ids in WORDS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_it_answers(model: LoadedModel, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer shortly."}]
    ids = tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
    lab, answer = Lab(model, make_ops("native"), 64, 400), list[int]()
    while len(answer) < 12 and model.spec.eos_token_ids[0] not in answer:
        answer.append(int(lab.whole(ids + answer).argmax()))
    assert tokenizer.decode(answer) == "The capital of France is Paris."


@pytest.mark.long
def test_bits_do_not_depend_on_chunks_or_company(model: LoadedModel, tokenizer: Tokenizer) -> None:
    texts = [tokenizer.encode(text * 9) for text in ("One, two, three. ", "def f(x): return x\n")]
    alone = [Lab(model, make_ops("native"), 32, 300).whole(ids) for ids in texts]
    lab = Lab(model, make_ops("native"), 32, 600, seed=1)
    found = lab.planned(texts, [{len(ids)} for ids in texts])
    for (got,), want in zip(found, alone, strict=True):
        assert torch.equal(got, want)
