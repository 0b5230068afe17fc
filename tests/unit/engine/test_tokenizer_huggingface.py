"""Compares tokenizers with `transformers`. The tests make the tokenizers, because they cannot reach
the Hub."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from moonpool.text.tokenizer import ChatTemplateError, TokenizerError
from moonpool.text.tokenizers.huggingface import HfTokenizer

CORPUS = ["The quick brown fox jumps over the lazy dog. " * 20, "été à Zürich, naïve coöperation"]
TEXTS = [
    "The quick brown fox",
    " leading and trailing ",
    "naïve Zürich 🎉 日本語 €",
    "tabs\tand\nnewlines\n\n  indented",
    "<|im_start|>user",
    "a",
]
CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be first') }}{% endif %}"
    "{% if loop.index0 > 6 %}{% break %}{% endif %}"
    "{{ bos_token if loop.first }}[{{ m['role'] | upper }}] {{ m['content'] | trim }}"
    "{% generation %}{{ eos_token }}{% endgeneration %}{% endfor %}"
    "{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "  Größe? 'yes' \"no\"  "},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a": "<é&>"}}}


def byte_level() -> tokenizers.Tokenizer:
    """Returns a tokenizer such as Llama 3 and Qwen have."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Returns a tokenizer such as Llama 2 and Mistral have."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    state = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    made = tokenizers.Tokenizer(
        models.BPE(state["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return made


def write_folder(folder: Path, made: tokenizers.Tokenizer, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte-level": write_folder(
            root / "byte-level", byte_level(), eos_token="<|im_end|>", chat_template=CHATML
        ),
        "sentencepiece": write_folder(
            root / "sentencepiece",
            sentencepiece_like(),
            bos_token="<s>",
            eos_token={"content": "</s>", "__type": "AddedToken"},
            chat_template=[
                {"name": "default", "template": CHATML},
                {"name": "tool_use", "template": TOOLS},
            ],
        ),
        "ignored flag": write_folder(
            root / "flag",
            byte_level(),
            bos_token="<|endoftext|>",
            eos_token="<|im_end|>",
            add_bos_token=True,
        ),
    }


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> dict[str, Any]:
    from transformers import PreTrainedTokenizerFast

    return {
        name: PreTrainedTokenizerFast.from_pretrained(folder) for name, folder in folders.items()
    }


NAMES = ["byte-level", "sentencepiece", "ignored flag"]


@pytest.mark.parametrize("name", NAMES)
def test_encodes_and_decodes_as_transformers(
    name: str, folders: dict[str, Path], reference: dict[str, Any]
) -> None:
    ours, theirs = HfTokenizer(folders[name]), reference[name]
    for text in [*TEXTS, "The quick brown fox " * 1000]:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_streamed_answer_are_the_whole_text(name: str, folders: dict[str, Path]) -> None:
    tokenizer = HfTokenizer(folders[name])
    for text in ("fox 🎉 日本語 née  two spaces\n", "x€", "The lazy dog"):
        ids = tokenizer.encode("The quick brown " + text)
        whole = tokenizer.decode(ids)
        for cut in range(2, len(ids)):
            prompt = tokenizer.decode(ids[:cut])
            stream = tokenizer.stream()
            parts = [stream.push(token_id) for token_id in ids[cut:]]
            if "\ufffd" in prompt:  # the cut was inside a character
                continue
            assert prompt + "".join(parts) + stream.flush() == whole
            assert all("\ufffd" not in part for part in parts)


def test_random_tokens_never_stall_a_stream(folders: dict[str, Path]) -> None:
    rng = random.Random(5)
    tokenizer = HfTokenizer(folders["byte-level"])
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(3000)]
    stream = tokenizer.stream()
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
    longest_silence = max(len(run) for run in "".join("x" if p else "." for p in pieces).split("x"))
    assert longest_silence < 16


def test_token_bytes_join_to_the_text(folders: dict[str, Path]) -> None:
    for name in ("byte-level", "sentencepiece"):
        tokenizer = HfTokenizer(folders[name])
        ids = tokenizer.encode("Zürich 🎉 日本語", add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert joined.removeprefix(" ") == "Zürich 🎉 日本語"
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_renders_chats_as_transformers(
    generation_prompt: bool, folders: dict[str, Path], reference: dict[str, Any]
) -> None:
    for name in ("byte-level", "sentencepiece"):
        for tools in (None, [TOOL]) if name == "sentencepiece" else (None,):
            expected = reference[name].apply_chat_template(
                MESSAGES, tools=tools, add_generation_prompt=generation_prompt, tokenize=False
            )
            ours = HfTokenizer(folders[name]).render_chat(MESSAGES, generation_prompt, tools)
            assert ours == expected


def test_a_template_can_refuse_the_messages(folders: dict[str, Path]) -> None:
    tokenizer = HfTokenizer(folders["sentencepiece"])
    with pytest.raises(ChatTemplateError, match="System message must be first"):
        tokenizer.render_chat(list(reversed(MESSAGES)), tools=[TOOL])


def test_tools_for_a_template_that_knows_none_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ChatTemplateError, match="does not support tools"):
        HfTokenizer(folders["byte-level"]).render_chat(MESSAGES, tools=[TOOL])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.x }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[99].content + 'x' }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_hostile_or_broken_template_is_a_clear_error(template: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), chat_template=template)
    tokenizer = HfTokenizer(folder)
    with pytest.raises(ChatTemplateError, match="chat template"):
        tokenizer.render_chat(MESSAGES)


def test_a_template_that_does_not_compile_is_found_when_it_is_asked_for(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), chat_template="{% for m in %}")
    tokenizer = HfTokenizer(folder)
    for use in (tokenizer.check_chat_template, lambda: tokenizer.render_chat(MESSAGES)):
        with pytest.raises(ChatTemplateError, match="does not compile"):
            use()


def test_a_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), chat_template="old")
    (folder / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    assert HfTokenizer(folder).render_chat(MESSAGES) == "new Be <brief> & kind."


def test_a_model_without_a_template_gets_plain_lines(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    text = HfTokenizer(folder).render_chat([{"role": "user", "content": "hi"}])
    assert text == "user: hi\nassistant:"


def test_all_end_tokens_are_found(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), eos_token="<|im_end|>")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert HfTokenizer(folder).eos_token_ids == (0, 2)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert HfTokenizer(folder).eos_token_ids == (0, 2)
    (folder / "generation_config.json").write_text('{"eos_token_id": "two"}')
    with pytest.raises(TokenizerError, match="eos_token_id"):
        HfTokenizer(folder)


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        HfTokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"convert tokenizer\.model"):
        HfTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read"):
        HfTokenizer(tmp_path)


def test_a_decoder_without_a_byte_map_streams_too(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(
        models.WordPiece({"[UNK]": 0, "quick": 1, "##ly": 2, "fox": 3}, unk_token="[UNK]")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    tokenizer = HfTokenizer(write_folder(tmp_path, made))
    stream = tokenizer.stream()
    ids = tokenizer.encode("quickly fox quick")
    assert [stream.push(i) for i in ids] == ["quick", "ly", " fox", " quick"]
    assert stream.flush() == ""
