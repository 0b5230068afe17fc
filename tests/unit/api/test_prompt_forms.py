"""Compares with transformers: prompts that a client continues or shortens, and words that it
bans."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from scripted_head import ScriptedHead, call, chat, complete, events_of, one_by_one, spoken
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from moonpool.api import body_process
from moonpool.api.bodies import ChatBody, CompletionBody
from moonpool.api.errors import ApiError
from moonpool.api.output_text.text_offsets import prompt_offsets
from moonpool.api.preparation import Preparer
from moonpool.api.prompts import PromptReader, Truncation
from moonpool.api.serving_backend import ApiOptions, ModelCard, Output
from moonpool.text.tokenizers.byte import ByteTokenizer
from moonpool.text.tokenizers.huggingface import HfTokenizer
from moonpool.types import BadWord, FinishReason, Request, Token, TokenLogprobs

CORPUS = ["The quick brown fox jumps over the lazy dog. " * 20, "été à Zürich, naïve coöperation"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMS = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} </s>{% endfor %}"
THINKS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}</{{ m.role }}>{% endfor %}"
)
DROPS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a tokenizer that puts tokens around every text, like the tokenizers of BERT and
    Llama."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    pairs = [(token, made.token_to_id(token)) for token in special]
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=pairs)
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    config |= {"name_or_path": "/secret", "model_max_length": 64, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def tokenizer(folder: Path) -> HfTokenizer:
    return HfTokenizer(folder)


def reader(tokenizer: HfTokenizer, most: int = 500) -> PromptReader:
    card = ModelCard(
        model_id="m",
        created_s=0,
        max_model_tokens=most,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=(),
    )
    return PromptReader(tokenizer, card, 1 << 20)


def turns(*contents: str) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


# Continuing the last message:


@pytest.mark.parametrize("template", [CHATML, TRIMS, THINKS], ids=["chatml", "trims", "thinks"])
@pytest.mark.parametrize(
    "contents",
    [
        ("Hi", "Hello"),
        ("Hi", "Hello, I am"),
        ("Hi", "Hello, I am "),
        ("Hi", "Hello,\n\n"),
        ("Hi", "  Hello"),
        ("Hi",),
        ("same", "same", "more", "same"),
        ("Hi", "<think>a</think>\nThe answer"),
        ("Hi", "<|im_end|>\n"),
        ("été", "Zürich 🎉"),
    ],
)
def test_the_last_message_is_continued_as_by_transformers(
    template: str, contents: tuple[str, ...], tokenizer: HfTokenizer, theirs: Any
) -> None:
    tokenizer.use_chat_template(template)
    messages = turns(*contents)
    asked = {"continue_final_message": True, "add_generation_prompt": False}

    def expected() -> str:
        text: str = theirs.apply_chat_template(
            messages, chat_template=template, tokenize=False, **asked
        )
        return text

    def found() -> str:
        return reader(tokenizer).chat_text(messages, tools=None, arguments={}, **asked)  # type: ignore[arg-type]

    try:
        wanted = expected()
    except ValueError:
        with pytest.raises(ApiError):
            found()
    else:
        assert found() == wanted
        assert wanted.rstrip().endswith(contents[-1].split("</think>")[-1].strip())


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"add_generation_prompt": True}, "continue_final_message", "to be false or left out"),
        ({"messages": []}, "messages", "at least one"),
        (
            {
                "messages": [
                    *turns("Hi"),
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
                ]
            },
            "messages[1].content",
            "needs text to continue",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(
    fields: dict[str, Any], param: str, words: str
) -> None:
    head = ScriptedHead()
    answer = chat(
        head, **({"messages": turns("Hi", "He"), "continue_final_message": True} | fields)
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"] and head.requests == []


def test_a_template_without_the_last_message_continues_nothing(tokenizer: HfTokenizer) -> None:
    tokenizer.use_chat_template(DROPS)
    body = ChatBody(messages=turns("Hi", "He"), continue_final_message=True)
    with pytest.raises(ApiError, match="does not show the text of the last message"):
        asyncio.run(reader(tokenizer).read_chat(body))


def test_tokenize_and_chat_continue_alike_and_echo_what_they_continue() -> None:
    head = ScriptedHead(lambda _: spoken("llo"))
    asked = {"messages": turns("Hi ", "He"), "continue_final_message": True}
    tokens = call(head, "/tokenize", asked).json()["tokens"]
    assert bytes(tokens) == b"Hi He"
    plain = chat(head, **asked).json()["choices"][0]["message"]["content"]
    echoed = chat(head, **asked, echo=True, logprobs=False).json()["choices"][0]["message"]
    assert (plain, echoed["content"]) == ("llo", "Hello")
    assert [bytes(request.token_ids) for request in head.requests] == [b"Hi He"] * 2
    chunks = events_of(chat(head, **asked, echo=True, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "He"}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello"


# Shortening a prompt:


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 12, 40])
def test_a_text_is_shortened_as_by_transformers(
    side: str, most: int, tokenizer: HfTokenizer, theirs: Any
) -> None:
    """As in transformers, the tokens around the text must be kept as long as there is room for
    them."""
    text = "The quick brown fox jumps over Zürich"
    theirs.truncation_side = side
    body = CompletionBody(
        prompt=text, truncate_prompt_tokens=most, truncation_side=side, max_tokens=1
    )
    (found,) = asyncio.run(reader(tokenizer).read_completion(body, 1))
    if most > 2:
        assert list(found) == theirs(text, truncation=True, max_length=most)["input_ids"]
    assert len(found) == min(most, len(theirs(text)["input_ids"]))
    body.add_special_tokens = False
    (plain,) = asyncio.run(reader(tokenizer).read_completion(body, 1))
    asked = {"truncation": True, "max_length": most, "add_special_tokens": False}
    assert list(plain) == theirs(text, **asked)["input_ids"]


def test_chats_ids_and_embeddings_are_shortened_too() -> None:
    head = ScriptedHead()
    chat(head, messages=turns("abcdef"), truncate_prompt_tokens=3)
    chat(head, messages=turns("abcdef"), truncate_prompt_tokens=3, truncation_side="right")
    complete(head, prompt=[[1, 2, 3], [4]], truncate_prompt_tokens=2)
    found = [tuple(request.token_ids) for request in head.requests]
    assert found == [(100, 101, 102), (97, 98, 99), (2, 3), (4,)]
    answer = complete(head, prompt="abcdef", truncate_prompt_tokens=2, max_tokens=1, echo=True)
    assert answer.json()["choices"][0]["text"].startswith("ef")
    assert answer.json()["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"messages": turns("Hi", "He")}, [b"HiHe"]),
        ({"messages": turns("Hi", "He"), "truncate_prompt_tokens": 3}, [b"HiH"]),
        (
            {"messages": turns("Hi"), "truncate_prompt_tokens": 1, "truncation_side": "left"},
            [b"i"],
        ),
        ({"input": ["abc", "d" * 999], "truncate_prompt_tokens": -1}, [b"abc", b"d" * 256]),
        ({"input": "abc", "truncate_prompt_tokens": 256}, [b"abc"]),
    ],
)
def test_chats_are_embedded_and_what_is_embedded_is_shortened(
    body: dict[str, Any], prompts: list[bytes]
) -> None:
    card = msgspec.structs.replace(ScriptedHead().card, embedding_size=8)
    preparer = Preparer(ByteTokenizer(), card, ApiOptions())
    work = body_process.BodyWork(
        kind="embeddings", party="", limit_s=9.0, raw=msgspec.json.encode(body)
    )
    done = body_process.perform(preparer, work)
    assert done.error is None
    found = body_process.unpack("embeddings", done)
    assert [bytes(prompt) for prompt in found.prompts] == prompts
    assert found.original.messages is None and found.original.input is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": turns("Hi"), "input": "x"}, "messages"),
        ({"messages": []}, "messages"),
        ({}, "input"),
        ({"messages": turns("x" * 300)}, "messages"),
        ({"input": "x", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens"),
    ],
)
def test_embeddings_that_cannot_be_made_are_refused(body: dict[str, Any], param: str) -> None:
    card = msgspec.structs.replace(ScriptedHead().card, embedding_size=8)
    preparer = Preparer(ByteTokenizer(), card, ApiOptions())
    with pytest.raises(ApiError) as found:
        asyncio.run(preparer.embeddings(msgspec.json.encode(body)))
    assert found.value.param == param


def test_minus_1_leaves_room_for_the_answer() -> None:
    head = ScriptedHead()  # a model with a context of 256 tokens
    for max_tokens, kept in [(16, 240), (255, 1)]:
        asked = {"prompt": "x" * 500, "truncate_prompt_tokens": -1, "max_tokens": max_tokens}
        assert complete(head, **asked).json()["usage"]["prompt_tokens"] == kept
    error = complete(head, truncate_prompt_tokens=-1, max_tokens=256).json()["error"]
    assert error["param"] == "truncate_prompt_tokens" and "leaves no prompt" in error["message"]


@pytest.mark.parametrize("wanted", [0, -2, 256, 10**30])
def test_a_length_out_of_range_is_told_the_range(wanted: int) -> None:
    error = complete(ScriptedHead(), truncate_prompt_tokens=wanted).json()["error"]
    assert error["param"] == "truncate_prompt_tokens"
    assert "must be -1, or between 1 and 255" in error["message"]


def test_a_long_text_is_not_tokenised_beyond_what_is_kept() -> None:
    text = "a" * 100 + "b" * 100
    assert Truncation(2, "left").cut_text(text, 10) == "b" * 20
    assert Truncation(2, "right").cut_text(text, 10) == "a" * 20
    assert Truncation(200, "right").cut_text(text, 10) == text


# Words and tokens:


def test_bad_words_have_the_tokens_that_vllm_bans(tokenizer: HfTokenizer, theirs: Any) -> None:
    """Tests vLLM's rule: a word is banned alone, and behind a space if that changes the first token
    but not the length."""
    words = ["fox", " fox", "quick", "The", "Zürich", "dog.", "x", "jumps over", "🎉"]
    for word in reader(tokenizer).bad_words(words):
        alone, behind = (
            theirs.encode(space + word.text.lstrip(), add_special_tokens=False)
            for space in ("", " ")
        )
        expected = [alone]
        if behind[0] != alone[0] and len(behind) == len(alone):
            expected.append(behind)
        assert [list(ids) for ids in word.token_ids] == expected
    assert any(len(word.token_ids) == 2 for word in reader(tokenizer).bad_words(words))


def test_words_and_tokens_reach_the_engine() -> None:
    head = ScriptedHead(lambda _: one_by_one(b"a", logprobs=True))
    fields = {
        "bad_words": ["ab", "c", "ab"],
        "allowed_token_ids": [5, 3, 5],
        "logprob_token_ids": [7, 8],
    }
    assert complete(head, **fields, logprobs=0).status_code == 200
    assert chat(head, **fields, logprobs=True).status_code == 200
    for request in head.requests:
        sampling = request.sampling
        assert sampling.bad_words == (BadWord("ab", ((97, 98),)), BadWord("c", ((99,),)))
        assert sampling.allowed_token_ids == (5, 3)
        assert sampling.logprob_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["  "]}, "bad_words"),
        ({"bad_words": ["a"] * 1025}, "bad_words"),
        ({"bad_words": ["a" * 5000]}, "bad_words"),
        ({"bad_words": [3]}, "bad_words[0]"),
        ({"bad_words": "a"}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [259]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids[0]"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"truncation_side": "top"}, "truncation_side"),
    ],
)
@pytest.mark.parametrize("ask", [chat, complete])
def test_bad_lists_are_named(ask: Any, fields: dict[str, Any], param: str) -> None:
    head = ScriptedHead()
    answer = ask(head, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert head.requests == []


def test_large_bodies_keep_their_words_and_echoes(folder: Path) -> None:
    """The process that reads bodies must pass on everything that the head needs."""
    preparer = Preparer(ByteTokenizer(), ScriptedHead().card, ApiOptions())
    body = {"messages": turns("Hi", "He"), "continue_final_message": True, "echo": True}
    raw = msgspec.json.encode(body | {"bad_words": ["no"], "return_token_ids": True})
    work = body_process.BodyWork(kind="chat", raw=raw, party="", limit_s=9.0)
    done = body_process.perform(preparer, work)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(done), type=body_process.BodyResult)
    found = body_process.unpack("chat", sent)
    assert found.bad_words == (BadWord("no", ((110, 111),)),)
    assert list(found.echoes) == ["He"]
    assert bytes(found.prompts[0]) == b"HiHe"


# Limits on tokens:


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/completions", "max_tokens", {"prompt": "Hi"}),
        ("/v1/chat/completions", "max_tokens", {"messages": turns("Hi")}),
        ("/v1/chat/completions", "max_completion_tokens", {"messages": turns("Hi")}),
        ("/v1/responses", "max_output_tokens", {"input": "Hi"}),
        ("/v1/messages", "max_tokens", {"messages": turns("Hi")}),
    ],
)
def test_a_limit_beyond_the_context_is_lowered_unless_that_is_forbidden(
    path: str, field: str, body: dict[str, Any]
) -> None:
    head = ScriptedHead(lambda _: spoken("a"))
    asked = body | {field: 32_000}
    assert call(head, path, asked).status_code == 200
    assert head.requests[0].sampling.max_tokens == 254
    refused = call(head, path, asked, options=ApiOptions(strict_max_tokens=True))
    assert refused.status_code == 400 and len(head.requests) == 1
    assert "maximum context length is 256 tokens" in refused.json()["error"]["message"]


def test_min_tokens_beyond_the_room_are_refused() -> None:
    error = complete(ScriptedHead(), max_tokens=999, min_tokens=300).json()["error"]
    assert (error["param"], error["code"]) == ("min_tokens", "invalid_value")
    assert "(254)" in error["message"]


# Messages:


def test_fields_of_a_message_that_are_not_known_reach_the_template() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.use_chat_template(
        "{% for m in messages %}{{ m.content }}{% if m.mood %}({{ m.mood }}){% endif %}{% endfor %}"
    )
    head = ScriptedHead(tokenizer=tokenizer)
    for extra in [
        {"mood": "glad"},
        {
            "reasoning_details": [],
            "cache_control": {"type": "ephemeral"},
            "id": "x",
            "prefix": True,
        },
        {"mood": None},
    ]:
        assert chat(head, messages=[{"role": "user", "content": "Hi", **extra}]).status_code == 200
    prompts = [bytes(request.token_ids) for request in head.requests]
    assert prompts == [b"Hi(glad)", b"Hi", b"Hi"]


def test_an_object_may_have_its_schema_beside_its_type() -> None:
    """Clients of llama.cpp, Together and Fireworks send the field in this form."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    head = ScriptedHead(lambda _: spoken('{"a":1}'))
    for wanted in [
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    ]:
        assert chat(head, response_format=wanted).status_code == 200
    assert len({request.sampling.grammar for request in head.requests}) == 1
    assert head.requests[0].sampling.grammar


# The start of each token:


@pytest.mark.parametrize(
    ("prompt", "echo", "text", "offsets"),
    [
        ("x", False, "🎉é!", [0, 0, 0, 0, 1, 1, 2]),
        ("éa", True, "🎉!", [0, 0, 1, 2, 2, 2, 2, 3]),
        ([256, 256, 97, 98], True, "c", [0, 0, 0, 1, 2]),
        ([97, 257, 98], True, "é", [0, 1, 1, 2, 2]),
    ],
)
def test_text_offsets_count_characters_of_the_text(
    prompt: Any, echo: bool, text: str, offsets: list[int]
) -> None:
    def script(request: Request) -> list[Output]:
        prompted = tuple(TokenLogprobs(-1.0) for _ in request.token_ids[1:])
        tokens = [Token(byte, TokenLogprobs(-0.5)) for byte in text.encode()]
        tokens[0] = Token(tokens[0].token_id, tokens[0].logprobs, prompted)
        outputs = [Output(tokens=(token,)) for token in tokens]
        return [*outputs, Output(finish_reason=FinishReason.LENGTH)]

    head = ScriptedHead(script)
    head.card = msgspec.structs.replace(head.card, scores_prompts=True)
    (choice,) = complete(head, prompt=prompt, echo=echo, logprobs=0).json()["choices"]
    assert choice["logprobs"]["text_offset"] == offsets
    assert max(offsets) < len(choice["text"])
    if not echo:
        streamed = events_of(complete(head, prompt=prompt, logprobs=0, stream=True))
        parts = [c["choices"][0]["logprobs"] for c in streamed if c["choices"][0]["logprobs"]]
        assert [offset for part in parts for offset in part["text_offset"]] == offsets


def test_an_echo_counts_special_tokens_where_the_text_shows_them(tokenizer: HfTokenizer) -> None:
    text = "a<s> The"
    token_ids = tokenizer.encode(text)  # a prompt that begins with <s> and ends with </s>
    offsets = prompt_offsets(token_ids, text, tokenizer)
    names = [tokenizer.token_name(token_id) for token_id in token_ids]
    starts = {name: offset for name, offset in zip(names, offsets, strict=True) if name != "<s>"}
    assert starts["a"] == 0 and starts["ĠThe" if "ĠThe" in names else "Ġ"] == 4
    assert [o for name, o in zip(names, offsets, strict=True) if name == "<s>"] == [0, 1]
    assert offsets[-1] == len(text)


# The tokenizer:


def test_token_strings_are_those_of_the_vocabulary(folder: Path, theirs: Any) -> None:
    head = ScriptedHead(tokenizer=HfTokenizer(folder))
    answer = call(head, "/tokenize", {"prompt": "The fox é", "return_token_strs": True}).json()
    assert answer["token_strs"] == theirs.convert_ids_to_tokens(answer["tokens"])
    plain = call(ScriptedHead(), "/tokenize", {"prompt": "aé", "return_token_strs": True}).json()
    assert plain["token_strs"] == ["a", "<0xC3>", "<0xA9>"]


def test_the_tokenizer_is_described(folder: Path) -> None:
    for tokenizer in (HfTokenizer(folder), ByteTokenizer()):
        found = call(ScriptedHead(tokenizer=tokenizer), "/tokenizer_info", method="GET").json()
        assert found["tokenizer_class"] and found["chat_template"]
        assert found["eos_token"] in ("</s>", "<eos>")
        assert "name_or_path" not in found
    closed = ApiOptions(api_keys={"k": "ann"})
    refused = call(ScriptedHead(), "/tokenizer_info", method="GET", options=closed)
    assert refused.status_code == 401


@pytest.mark.parametrize(
    ("path", "other", "body"),
    [
        ("/chat/completions", "/v1/chat/completions", {"messages": turns("Hi")}),
        ("/responses", "/v1/responses", {"input": "Hi"}),
        ("/models", "/v1/models", None),
    ],
)
def test_paths_of_llama_cpp_are_those_below_v1(path: str, other: str, body: Any) -> None:
    method = "POST" if body else "GET"
    found = [call(ScriptedHead(), p, body, method=method) for p in (path, other)]
    assert [response.status_code for response in found] == [200, 200]
    assert found[0].json().keys() == found[1].json().keys()
    closed = ApiOptions(api_keys={"k": "ann"})
    assert call(ScriptedHead(), path, body, method=method, options=closed).status_code == 401
