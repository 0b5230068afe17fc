"""Writes GGUF files with any metadata and tensors, including a complete tiny Llama."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moonpool_engine.engine.quantized.formats import FORMATS, Format

KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12,
         "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30, "MXFP4": 39}  # fmt: skip
ALIGNMENT = 32


def random_groups(format: Format, count: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Returns stored groups [count, format.bytes] of random numbers, with scales around 0.05."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (count, format.bytes), dtype=np.uint8)
    scales = (rng.random((count, 2)) * 0.1 - 0.03).astype(np.float16).view(np.uint8)
    if format.name == "Q6_K":
        data[:, 208:] = scales[:, :2]
    elif format.name == "MXFP4":
        data[:, 0] = rng.integers(110, 125, count)
    elif format.name == "W4":
        data[:, :8] = rng.standard_normal((count, 2)).astype(np.float32).view(np.uint8)
    else:
        width = 4 if format.has_minimum else 2
        data[:, :width] = scales[:, :width]
    return data


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value_bytes(value: Any) -> bytes:
    """Returns the bytes of a value after its type, as in the metadata."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if all(isinstance(each, str) for each in value):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    code, kind = ("f", 6) if any(isinstance(each, float) for each in value) else ("i", 5)
    return struct.pack(f"<IIQ{len(value)}{code}", 9, kind, len(value), *value)


@dataclass
class Stored:
    """Holds one tensor: the name of its type, its shape (rows first), its bytes."""

    kind: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(tensor: Tensor) -> Stored:
        return Stored("F32", tuple(tensor.shape), tensor.float().numpy().tobytes())

    @staticmethod
    def random(kind: str, shape: tuple[int, ...], seed: int) -> Stored:
        format = FORMATS[kind]
        count = int(np.prod(shape)) // format.group
        return Stored(kind, shape, random_groups(format, count, seed).tobytes())


@dataclass
class GgufDraft:
    """A file before it is written, of which tests can change the parts."""

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)

    def header(self) -> bytes:
        parts = [b"GGUF", struct.pack("<IQQ", 3, len(self.tensors), len(self.metadata))]
        parts += [text(key) + value_bytes(value) for key, value in self.metadata.items()]
        offset = 0
        for name, stored in self.tensors.items():
            parts.append(text(name) + struct.pack("<I", len(stored.shape)))
            parts.append(struct.pack(f"<{len(stored.shape)}Q", *stored.shape[::-1]))
            parts.append(struct.pack("<IQ", KINDS[stored.kind], offset))
            offset += -(-len(stored.data) // ALIGNMENT) * ALIGNMENT
        return b"".join(parts)

    def content(self) -> bytes:
        data = [self.header()]
        data.append(bytes(-len(data[0]) % ALIGNMENT))
        for stored in self.tensors.values():
            data += [stored.data, bytes(-len(stored.data) % ALIGNMENT)]
        return b"".join(data)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.content())
        return path

    def parts(self, count: int, first_is_empty: bool = False) -> list[GgufDraft]:
        """Writes the same model in several files, as `llama-gguf-split` does: the first file has
        the metadata."""
        names = list(self.tensors)
        made = []
        share = -(-len(names) // (count - first_is_empty))
        for number in range(count):
            begin = (number - first_is_empty) * share
            own = names[max(begin, 0) : begin + share]
            split = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
            metadata = split if number else {**self.metadata, **split}
            made.append(GgufDraft(metadata, {name: self.tensors[name] for name in own}))
        return made

    def write_parts(self, folder: Path, count: int, first_is_empty: bool = False) -> Path:
        """Writes the parts; returns the path of the first part."""
        return write_parts(self.parts(count, first_is_empty), folder)


def write_parts(drafts: Sequence[GgufDraft], folder: Path) -> Path:
    paths = [
        draft.write(folder / f"m-{number:05}-of-{len(drafts):05}.gguf")
        for number, draft in enumerate(drafts, 1)
    ]
    return paths[0]


def byte_vocabulary() -> list[str]:
    """Returns GPT-2's alphabet in the order of the bytes, then "ab", "abc" and two special
    tokens."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(0x100, 0x200))
    alphabet = [chr(b) if b in printable else chr(next(rest)) for b in range(256)]
    return [*alphabet, "ab", "abc", "<s>", "<end>"]


def tiny_llama(kinds: Mapping[str, str], hidden: int = 64, inter: int = 96) -> GgufDraft:
    """Makes a Llama of two layers and 4:2 heads. `kinds` maps the last part of a tensor's name to a
    type, and "" to the type of the rest."""
    words = byte_vocabulary()
    draft = GgufDraft(
        {
            "general.architecture": "llama",
            "llama.block_count": 2,
            "llama.context_length": 512,
            "llama.embedding_length": hidden,
            "llama.feed_forward_length": inter,
            "llama.attention.head_count": 4,
            "llama.attention.head_count_kv": 2,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": 10000.0,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.tokens": words,
            "tokenizer.ggml.token_type": [1] * 258 + [3, 3],
            "tokenizer.ggml.merges": ["a b", "ab c"],
            "tokenizer.ggml.bos_token_id": 258,
            "tokenizer.ggml.eos_token_id": 259,
            "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}<end>{% endfor %}",
        }
    )
    shapes = {"token_embd": (len(words), hidden), "output_norm": (hidden,)}
    for layer in range(2):
        block = {
            "attn_norm": (hidden,),
            "attn_q": (hidden, hidden),
            "attn_k": (hidden // 2, hidden),
            "attn_v": (hidden // 2, hidden),
            "attn_output": (hidden, hidden),
            "ffn_norm": (hidden,),
            "ffn_gate": (inter, hidden),
            "ffn_up": (inter, hidden),
            "ffn_down": (hidden, inter),
        }
        shapes |= {f"blk.{layer}.{part}": shape for part, shape in block.items()}
    for seed, (name, shape) in enumerate(shapes.items()):
        kind = kinds.get(name.rpartition(".")[2], kinds[""])
        if len(shape) == 1:
            draft.tensors[f"{name}.weight"] = Stored.of(torch.ones(shape))
        elif kind == "F32":
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randn(shape, generator=generator) * hidden**-0.5
            draft.tensors[f"{name}.weight"] = Stored.of(drawn)
        else:
            draft.tensors[f"{name}.weight"] = Stored.random(kind, shape, seed)
    return draft
