"""Fuzzes the files of a model as one JSON object: its files by name, or a GGUF file's metadata.

Tensors are not mutated here; the readers of bytes do that. If a file can be opened, it is then used
like a server would use it.
"""

from __future__ import annotations

import functools
import json
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moonpool.text.model_info import read_model_info
from moonpool.text.tokenizer import ChatTemplateError, Tokenizer
from moonpool_engine.engine.builtin import export_checkpoint, open_model
from moonpool_engine.engine.gguf.checkpoint import open_gguf
from moonpool_engine.engine.gguf.tokenizer import GgufVocabulary, gguf_tokenizer
from moonpool_engine.engine.rope import rope_table
from moonpool_engine.engine.spec import ModelSpec
from moonpool_engine.engine.tensors import tensor_shapes
from moonpool_engine.engine.tokenizers import open_tokenizer
from tests.differential.adapters import write_adapter
from tests.unit.engine import test_quantized_checkpoints as quantized
from tests.unit.engine.gguf_files import GgufDraft, text, tiny_llama, value_bytes
from tests.unit.engine.test_tokenizer_huggingface import byte_level, sentencepiece_like

TINY = "random:hidden=32,layers=1,heads=2,kv_heads=1,inter=32,vocab=300,context=64"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
LINEAR = {"model.layers.0.self_attn.q_proj": (32, 32)}
MAX_TABLE_POSITIONS = 256


@functools.cache
def _folder(case: str) -> Path:
    """Makes a checkpoint with all files that are read. The name "" means two shards with an
    adapter; any other name means that quantization."""
    folder = Path(tempfile.mkdtemp(prefix="moonpool-fuzz-model-"))
    if case:
        quantized.write(folder, case)
        return folder
    export_checkpoint(open_model(TINY, "float32"), folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for shard, own in zip(SHARDS, halves, strict=True):
        save_file({name: tensors[name] for name in own}, folder / shard)
    _write(folder, _words({name: SHARDS[name in halves[1]] for name in names}))
    write_adapter(folder / "adapter", LINEAR, 4, 1)
    return folder


def _words(weight_map: dict[str, str]) -> dict[str, Any]:
    modules = [
        {"path": "" if kind == "Transformer" else f"1_{kind}", "type": f"a.models.{kind}"}
        for kind in ("Transformer", "Pooling")
    ]
    return {
        "model.safetensors.index.json": {"metadata": {"total_size": 1}, "weight_map": weight_map},
        "generation_config.json": {"eos_token_id": [0, 2], "temperature": 0.6, "top_k": 20},
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": TEMPLATE},
        "special_tokens_map.json": {"bos_token": {"content": "<|endoftext|>"}},
        "chat_template.json": {"chat_template": [{"name": "default", "template": TEMPLATE}]},
        "modules.json": modules,
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 4},
    }


def _write(folder: Path, files: Any) -> None:
    for name, value in files.items():
        if name in _NAMES:
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(value))


_NAMES = frozenset(
    {
        *_words({}),
        "config.json",
        "tokenizer.json",
        "adapter/adapter_config.json",
    }
)


def checkpoint_samples() -> list[bytes]:
    samples = []
    for case in ("", *quantized.CASES):
        folder = _folder(case)
        files = {name: json.loads((folder / name).read_text()) for name in _NAMES if
                 (folder / name).exists()}  # fmt: skip
        for made in (byte_level(), sentencepiece_like()) if not case else ():
            words = {"tokenizer.json": json.loads(made.to_str())}
            samples.append(json.dumps({"case": case, "files": files | words}).encode())
        if case:
            samples.append(json.dumps({"case": case, "files": files}).encode())
    return samples


def read_model_files(data: bytes, folder: Path) -> None:
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return
    case = given.get("case") if isinstance(given, dict) else None
    if case not in ("", *quantized.CASES) or not isinstance(given.get("files"), dict):
        return
    model = folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(_folder(case), model)
    for name in _NAMES:
        (model / name).unlink(missing_ok=True)
    _write(model, given["files"])
    read_model_info(str(model))
    adapters = (f"a={model / 'adapter'}",) if (model / "adapter").exists() else ()
    opened = open_model(str(model), "float32", adapters)
    use_spec(opened.spec)
    for tensor in tensor_shapes(opened.spec):
        opened.weights.load(tensor)
    if (model / "tokenizer.json").exists():
        use_tokenizer(open_tokenizer(opened.tokenizer, opened.spec.vocab_size))


def use_spec(spec: ModelSpec) -> None:
    """Makes the computations that an engine makes from the numbers of a spec before it reads
    weights."""
    positions = min(spec.max_positions, MAX_TABLE_POSITIONS)
    rope_table(spec.rope, spec.head_dim, positions)
    if spec.local_rope is not None:
        rope_table(spec.local_rope, spec.head_dim, positions)
    assert len(repr(spec.computed_fields())) > 0
    assert spec.num_parameters > 0
    assert spec.scale() > 0


def use_tokenizer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab <|im_end|>")
    tokenizer.decode(ids)
    stream = tokenizer.stream()
    for token in (*ids, 0, 1, tokenizer.vocab_size):
        stream.push(token)
    stream.flush()
    try:
        tokenizer.render_chat([{"role": "user", "content": "a"}])
    except ChatTemplateError:
        return


def gguf_samples() -> list[bytes]:
    llama = tiny_llama({"": "Q8_0"}).metadata
    scored = {key: value for key, value in llama.items() if not key.endswith("merges")}
    scored |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [float(-i) for i in range(260)],
        "tokenizer.ggml.add_bos_token": True,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
        "llama.pooling_type": 1,
    }
    return [json.dumps(metadata).encode() for metadata in (llama, scored)]


def read_gguf_metadata(data: bytes, folder: Path) -> None:
    try:
        metadata = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(metadata, dict):
        return
    path = _AnyDraft(metadata, tiny_llama({"": "Q8_0"}).tensors).write(folder / "model.gguf")
    opened = open_gguf(path, torch.float32)
    use_spec(opened.spec)
    for tensor in tensor_shapes(opened.spec):
        opened.weights.load(tensor)
    vocabulary = GgufVocabulary(path)
    assert vocabulary.token_bytes(0) is not None
    use_tokenizer(gguf_tokenizer(path))


class _AnyDraft(GgufDraft):
    """Makes a file whose metadata are any JSON."""

    def header(self) -> bytes:
        plain, self.metadata = self.metadata, {}
        header = bytearray(super().header())
        self.metadata = plain
        entries = [_entry(key, value) for key, value in plain.items()]
        struct.pack_into("<Q", header, 16, len(entries))
        return bytes(header[:24]) + b"".join(entries) + bytes(header[24:])


def _entry(key: str, value: Any) -> bytes:
    return text(key.encode("utf-8", "replace").decode()) + _typed(value)


def _typed(value: Any) -> bytes:
    """Converts a value of any JSON type to the nearest GGUF type."""
    match value:
        case bool():
            return value_bytes(value)
        case int():
            code, kind = ("I", 4) if 0 <= value < 2**32 else ("q", 11)
            return struct.pack(f"<I{code}", kind, max(min(value, 2**63 - 1), -(2**63)))
        case float():
            return struct.pack("<Id", 12, value)
        case str():
            return value_bytes(value.encode("utf-8", "replace").decode())
        case list() if value and all(isinstance(each, int | float) for each in value):
            return struct.pack(f"<IIQ{len(value)}d", 9, 12, len(value), *map(_float, value))
        case list():
            return value_bytes([str(each).encode("utf-8", "replace").decode() for each in value])
        case _:
            return value_bytes(repr(value))


def _float(value: float) -> float:
    return float(max(min(value, 1e300), -1e300))
