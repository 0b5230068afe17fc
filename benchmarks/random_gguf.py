"""Writes a GGUF file with random weights: `python -m benchmarks.random_gguf SHAPE FORMAT FILE`.

The shape is that of a published model, with as many tokens and merges in the tokenizer as the model
has, because reading them takes time. Linears are in FORMAT; the embedding is Q6_K, as in files of
the kind Q4_K_M. FORMAT Q4_K_M also has Q6_K in `attn_v` and `ffn_down` of half of the layers, those
that llama.cpp chooses. `qwen3-30b-a3b-8-layers` is a mixture of experts, cut to a sixth of its
depth.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from moonpool_engine.engine.quantized.formats import FORMATS

USAGE = "usage: python -m benchmarks.random_gguf SHAPE FORMAT FILE"
KINDS = {"F32": 0, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}
EMBEDDING = "Q6_K"
ALIGNMENT = 32
PIECE_GROUPS = 1 << 16
SCALES = {"Q4_0": 0.004, "Q8_0": 0.0003, "Q4_K": 0.00015, "Q6_K": 0.000015}
"""Scales of a group, so that weights have a standard deviation of about 0.02."""
SCALE_AT = {"Q6_K": 208}
MIXES = {"Q4_K_M": ("Q4_K", "Q6_K")}
"""Mixes of two formats: one for most linears, and one for those that lose most by rounding."""
SENSITIVE = ("attn_v", "ffn_down", "ffn_down_exps")


@dataclass(frozen=True, slots=True)
class GgufShape:
    """A decoder of Qwen3's family with tied embeddings; with experts, of Qwen3-MoE's."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int  # intermediate size of an expert, if the model has experts
    vocab: int
    experts: int = 0
    experts_per_token: int = 0

    @property
    def architecture(self) -> str:
        return "qwen3moe" if self.experts else "qwen3"


SHAPES = {
    "qwen3-1.7b": GgufShape(2048, 28, 16, 8, 128, 6144, 151936),
    "qwen3-0.6b": GgufShape(1024, 28, 16, 8, 128, 3072, 151936),
    "qwen3-30b-a3b-8-layers": GgufShape(2048, 8, 32, 4, 128, 768, 151936, 128, 8),
    "tiny": GgufShape(256, 2, 4, 2, 64, 512, 512),
    "tiny-mixture": GgufShape(256, 2, 4, 2, 64, 256, 512, 4, 2),
}


class ShapeError(Exception):
    """A shape or a format that this module does not know."""


def write_random_gguf(shape_name: str, kind: str, path: Path) -> None:
    """Raises ShapeError, OSError."""
    if shape_name not in SHAPES or kind not in {*SCALES, *MIXES}:
        kinds = ", ".join([*SCALES, *MIXES])
        raise ShapeError(f"shapes are {', '.join(SHAPES)}; formats are {kinds}")
    shape = SHAPES[shape_name]
    tensors = _tensors(shape, kind)
    with path.open("wb") as file:
        file.write(_header(shape, tensors))
        for seed, (stored, dims) in enumerate(tensors.values()):
            file.write(bytes(-file.tell() % ALIGNMENT))
            for piece in _data(stored, dims, seed):
                file.write(piece)


def _tensors(shape: GgufShape, kind: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the type and shape of each tensor, by name."""
    hidden, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found = {
        "token_embd.weight": (EMBEDDING, (shape.vocab, hidden)),
        "output_norm.weight": ("F32", (hidden,)),
    }
    for layer in range(shape.layers):
        linears = {
            "attn_q": (q, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, q),
            **_mlp(shape),
        }
        norms = {"attn_norm": hidden, "ffn_norm": hidden}
        norms |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
        for name, dims in linears.items():
            stored = _format(kind, name, layer, shape.layers)
            found[f"blk.{layer}.{name}.weight"] = stored, dims
        found |= {f"blk.{layer}.{name}.weight": ("F32", (size,)) for name, size in norms.items()}
        if shape.experts:
            router = shape.experts, hidden
            found[f"blk.{layer}.ffn_gate_inp.weight"] = "F32", router
    return found


def _mlp(shape: GgufShape) -> dict[str, tuple[int, ...]]:
    hidden, inter = shape.hidden, shape.inter
    linears = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    if not shape.experts:
        return {f"ffn_{name}": dims for name, dims in linears.items()}
    return {f"ffn_{name}_exps": (shape.experts, *dims) for name, dims in linears.items()}


def _format(kind: str, name: str, layer: int, layers: int) -> str:
    """Returns the format of one linear. llama.cpp keeps the first and last eighth precise, and a
    third of the rest."""
    usual, precise = MIXES.get(kind, (kind, kind))
    edge = layer < layers // 8 or layer >= 7 * layers // 8
    chosen = edge or (layer - layers // 8) % 3 == 2
    return precise if name in SENSITIVE and chosen else usual


def _header(shape: GgufShape, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> bytes:
    tokens, merges = _vocabulary(shape.vocab - 2)
    tokens += ["<s>", "<end>"]
    sizes = {
        "block_count": shape.layers,
        "context_length": 32768,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.inter,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
    }
    if shape.experts:
        sizes |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.experts_per_token,
            "expert_feed_forward_length": shape.inter,
        }
    own = shape.architecture
    values = [_text("general.architecture") + struct.pack("<I", 8) + _text(own)]
    values += [_text(f"{own}.{k}") + struct.pack("<II", 4, v) for k, v in sizes.items()]
    reals = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6}
    values += [_text(f"{own}.{k}") + struct.pack("<If", 6, v) for k, v in reals.items()]
    words = {"model": "gpt2", "pre": "qwen2"}
    values += [
        _text(f"tokenizer.ggml.{k}") + struct.pack("<I", 8) + _text(v) for k, v in words.items()
    ]
    ids = {"bos_token_id": shape.vocab - 2, "eos_token_id": shape.vocab - 1}
    values += [_text(f"tokenizer.ggml.{k}") + struct.pack("<II", 4, v) for k, v in ids.items()]
    for key, texts in (("tokens", tokens), ("merges", merges)):
        start = _text(f"tokenizer.ggml.{key}") + struct.pack("<IIQ", 9, 8, len(texts))
        values.append(start + b"".join(map(_text, texts)))
    kinds = np.full(shape.vocab, 1, np.int32)
    kinds[-2:] = 3
    start = _text("tokenizer.ggml.token_type") + struct.pack("<IIQ", 9, 5, shape.vocab)
    values.append(start + kinds.tobytes())
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(values)), *values]
    offset = 0
    for name, (kind, dims) in tensors.items():
        parts.append(_text(name) + struct.pack("<I", len(dims)))
        parts.append(struct.pack(f"<{len(dims)}Q", *dims[::-1]))
        parts.append(struct.pack("<IQ", KINDS[kind], offset))
        offset += -(-_num_bytes(kind, dims) // ALIGNMENT) * ALIGNMENT
    return b"".join(parts)


def _num_bytes(kind: str, dims: tuple[int, ...]) -> int:
    if kind == "F32":
        return 4 * prod(dims)
    return prod(dims) // FORMATS[kind].group * FORMATS[kind].bytes


def _data(kind: str, dims: tuple[int, ...], seed: int) -> Iterator[bytes]:
    if kind == "F32":
        if len(dims) == 1:
            yield np.ones(dims, np.float32).tobytes()
        else:  # a router
            drawn = np.random.default_rng(seed).standard_normal(dims, np.float32)
            yield (drawn * dims[-1] ** -0.5).tobytes()
        return
    format, rng = FORMATS[kind], np.random.Generator(np.random.SFC64(seed))
    left, at = prod(dims) // format.group, SCALE_AT.get(kind, 0)
    while left:
        count = min(left, PIECE_GROUPS)
        data = rng.integers(0, 256, (count, format.bytes), dtype=np.uint8)
        scale = SCALES[kind] * (0.5 + rng.random((count, 1)))
        scales = [scale, 7.5 * scale] if format.has_minimum else [scale]
        halves = np.concatenate(scales, axis=1).astype(np.float16).view(np.uint8)
        data[:, at : at + halves.shape[1]] = halves
        left -= count
        yield data.tobytes()


def _vocabulary(count: int) -> tuple[list[str], list[str]]:
    """Returns tokens of one byte, then of two, then of three, with the merges that make them."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(0x100, 0x200))
    alphabet = [chr(b) if b in printable else chr(next(rest)) for b in range(256)]
    tokens, merges, longest = list(alphabet), [], alphabet
    while len(tokens) < count:
        added = [(left, right) for left in longest for right in alphabet][: count - len(tokens)]
        merges += [f"{left} {right}" for left, right in added]
        longest = [left + right for left, right in added]
        tokens += longest
    return tokens[:count], merges


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def main() -> int:
    """Returns the exit status."""
    if len(sys.argv) != 4:
        sys.stderr.write(USAGE + "\n")
        return 2
    try:
        write_random_gguf(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    except (ShapeError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
