"""Tests models in GGUF files: their logits are near those of the same weights in safetensors, and
equal on every way of computing."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moonpool.installation import small_model_command
from moonpool.text.model_error import ModelError
from moonpool_engine.engine.builtin import open_model, open_tokenizer
from moonpool_engine.engine.gguf.files import PACKAGED, gguf_file
from moonpool_engine.engine.model import DecoderModel
from moonpool_engine.engine.reference import ReferenceOps
from moonpool_engine.engine.tensors import tensor_shapes
from tests.differential.plans import Lab, make_ops, random_prompts, usable_ops
from tests.unit.engine.gguf_files import tiny_llama

MIXED = {"": "Q4_0", "attn_v": "Q8_0", "ffn_down": "Q5_1", "token_embd": "Q8_0"}
SUPER = {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q5_K"}
PROMPT = [random.Random(1).randrange(258) for _ in range(150)]


@pytest.fixture(params=["reference", "native"])
def ops_name(request: pytest.FixtureRequest) -> str:
    return usable_ops(request)


def as_folder(gguf: Path, folder: Path) -> None:
    """Writes the file's dequantized weights as a Hugging Face checkpoint."""
    model = open_model(str(gguf), "float32")
    spec = model.spec
    folder.mkdir()
    save_file({n: model.weights.load(n) for n in tensor_shapes(spec)}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.rms_eps,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))


def logits(model: str, ops_name: str, num_shards: int = 1) -> Tensor:
    lab = Lab(open_model(model, "float32"), make_ops(ops_name), 16, 200, num_shards=num_shards)
    return lab.whole(PROMPT)


@pytest.mark.parametrize("kinds", [MIXED, SUPER], ids=["groups of 32", "groups of 256"])
def test_logits_are_those_of_the_dequantized_weights(
    tmp_path: Path, ops_name: str, kinds: dict[str, str]
) -> None:
    size = 256 if kinds is SUPER else 64
    gguf = tiny_llama(kinds, size, size).write(tmp_path / "tiny.gguf")
    as_folder(gguf, tmp_path / "tiny")
    exact = logits(str(tmp_path / "tiny"), ops_name)
    found = logits(str(gguf), ops_name)
    assert (found - exact).abs().max() < 5e-3 * exact.abs().max()
    # If rows of q and k stayed in their stored order, RoPE would rotate the wrong pairs.
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "tiny")
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0, -1]
    assert (exact - expected).abs().max() < 1e-4 * expected.abs().max()


def test_plain_tensors_are_read_as_they_are_from_safetensors(tmp_path: Path, ops_name: str) -> None:
    gguf = tiny_llama({"": "F32"}).write(tmp_path / "tiny.gguf")
    as_folder(gguf, tmp_path / "tiny")
    assert torch.equal(logits(str(tmp_path / "tiny"), ops_name), logits(str(gguf), ops_name))


@pytest.mark.parametrize("num_shards", [1, 2])
def test_any_plan_gives_the_bits_of_the_whole_prompt_alone(
    tmp_path: Path, ops_name: str, num_shards: int
) -> None:
    model = open_model(str(tiny_llama(MIXED).write(tmp_path / "t.gguf")), "bfloat16")
    texts = random_prompts(random.Random(num_shards), 5, 258, 100)
    marks = [{len(t)} for t in texts]
    total = sum(map(len, texts))
    alone = Lab(model, make_ops(ops_name), 16, total, num_shards=num_shards)
    expected = [alone.whole(t) for t in texts]
    for plan in range(3):
        lab = Lab(model, make_ops(ops_name), 16, total + 300, plan, num_shards)
        for got, want in zip(lab.planned(texts, marks), expected, strict=True):
            assert torch.equal(got[0], want)


def test_shards_give_nearly_the_same_also_where_they_cut_within_groups(
    tmp_path: Path, ops_name: str
) -> None:
    """With two shards, the matrix of 96 columns is not quantized, because its half is no border of
    groups of 32."""
    gguf = str(tiny_llama(MIXED, inter=96).write(tmp_path / "t.gguf"))
    one, two = (logits(gguf, ops_name, shards) for shards in (1, 2))
    assert (one - two).abs().max() < 5e-3 * one.abs().max()


def test_the_fingerprint_tells_formats_and_weights_apart(tmp_path: Path) -> None:
    drafts = [tiny_llama(MIXED), tiny_llama({**MIXED, "ffn_up": "Q4_1"}), tiny_llama(MIXED)]
    changed = drafts[2].tensors["blk.1.ffn_gate.weight"]
    changed.data = bytes(64) + changed.data[64:]
    files = [d.write(tmp_path / f"{i}.gguf") for i, d in enumerate(drafts)]
    seen = {open_model(str(file), "float32").fingerprint for file in files}
    assert len(seen) == 3
    assert open_model(str(files[0]), "bfloat16").fingerprint in seen


def test_stages_compute_the_same_bits(tmp_path: Path) -> None:
    model = open_model(str(tiny_llama(MIXED).write(tmp_path / "t.gguf")), "float32")
    ops = ReferenceOps()
    with torch.inference_mode():
        whole = DecoderModel(model.spec, model.weights, ops)
        first = DecoderModel(model.spec, model.weights, ops, range(1))
        last = DecoderModel(model.spec, model.weights, ops, range(1, 2))
        residual, normed = first.embed(torch.tensor(PROMPT[:5]))
        assert torch.equal(first.qkv(0, normed), whole.qkv(0, normed))
        assert torch.equal(last.logits(normed), whole.logits(normed))
        assert residual.shape == (5, 64)


def test_words_and_template_come_from_the_file(tmp_path: Path) -> None:
    model = open_model(str(tiny_llama(MIXED).write(tmp_path / "t.gguf")), "float32")
    tokenizer = open_tokenizer(model.tokenizer, model.spec.vocab_size)
    assert tokenizer.encode("abcab é<end>") == [257, 256, 32, 0xC3, 0xA9, 259]
    assert tokenizer.decode([257, 32, 0xC3, 0xA9]) == "abc é"
    assert tokenizer.eos_token_ids == model.spec.eos_token_ids == (259,)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi<end>"


def test_doubled_tokens_and_merges_of_no_tokens_are_left_out(tmp_path: Path) -> None:
    draft = tiny_llama(MIXED)
    words = draft.metadata["tokenizer.ggml.tokens"]
    draft.metadata["tokenizer.ggml.tokens"] = [*words[:257], "ab", *words[258:]]
    # only the last merge joins two tokens of the vocabulary
    merges = ["b c", "a  b", "ab", "a b c", "c zz", " a", "a b"]
    draft.metadata["tokenizer.ggml.merges"] = merges
    tokenizer = open_tokenizer(str(draft.write(tmp_path / "t.gguf")), 260)
    assert tokenizer.encode("abc") == [256, 99]
    assert [tokenizer.token_bytes(i) for i in (256, 195, 32, 258)] == [b"ab", b"\xc3", b" ", b"<s>"]
    assert tokenizer.token_bytes(257) == b""


def test_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    draft = tiny_llama(MIXED)
    draft.metadata["tokenizer.ggml.add_bos_token"] = True
    tokenizer = open_tokenizer(str(draft.write(tmp_path / "t.gguf")), 260)
    assert tokenizer.encode("a") == [258, 97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_sentencepiece_merges_follow_from_scores(tmp_path: Path) -> None:
    draft = tiny_llama(MIXED)
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "c"]
    words += ["ab", "bc", "▁a", "▁ab", "abc"]
    # "bc" is joined before "ab", and "▁a" before both
    scores = [0.0] * 263 + [-4.0, -3.0, -2.0, -5.0, -6.0]
    draft.metadata |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 9,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    del draft.metadata["tokenizer.ggml.merges"]
    tokenizer = open_tokenizer(str(draft.write(tmp_path / "t.gguf")), 272)
    ids = tokenizer.encode("abc é")
    assert [words[i] for i in ids] == ["<s>", "▁a", "bc", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "abc é"


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("no/such.gguf", "does not exist"), ("smollm2", re.escape(small_model_command()))],
)
def test_names_of_absent_files(name: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED, "smollm2", ("no_such_module", "x.gguf"))
    with pytest.raises(ModelError, match=pattern):
        open_model(name, "float32")


def test_a_file_in_the_hub_has_a_name_of_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def download(repo: str, file: str) -> str:
        seen.append((repo, file))
        return f"/cache/{file}"

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert gguf_file("org/repo:sub/m.Q4_K_M.gguf") == Path("/cache/sub/m.Q4_K_M.gguf")
    assert seen == [("org/repo", "sub/m.Q4_K_M.gguf")]
    assert gguf_file("org/repo") is None
