"""Tests the reader of GGUF headers: bad files give one line, and take little memory."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.text.model_error import ModelError
from moonpool.text.tokenizer import TokenizerError
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.gguf.reader import read_gguf
from moonpool_engine.engine.gguf.tokenizer import gguf_tokenizer
from tests.unit.engine.gguf_files import GgufDraft, Stored, text, tiny_llama, value_bytes

WHOLE = tiny_llama({"": "Q8_0"}).content()
MOST_TAKEN_BYTES = 20 << 20
HEADER_BYTES = len(tiny_llama({"": "Q8_0"}).header())


def refused(path: Path, content: bytes, pattern: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ModelError, match=pattern) as caught:
        open_model(str(path), "float32")
    assert "\n" not in str(caught.value)


def test_metadata_and_tensors_are_read(tmp_path: Path) -> None:
    numbers = torch.arange(6.0).view(2, 3)
    draft = GgufDraft({"a": 3, "b": "x", "c": [1, 2], "d": ["p", "q"], "e": True, "f": 0.5})
    draft.tensors = {"t": Stored.of(numbers), "q": Stored.random("Q4_0", (3, 64), 1)}
    file = read_gguf(draft.write(tmp_path / "m.gguf"))
    read = dict(file.metadata)
    assert read.pop("c").tolist() == [1, 2]
    assert read.pop("d").texts == ["p", "q"]
    assert read == {"a": 3, "b": "x", "e": True, "f": 0.5}
    assert torch.equal(file.tensor("t"), numbers)
    assert file.rows("q").data.numpy().tobytes() == draft.tensors["q"].data
    assert file.rows("q").width == 64


def entry(name: str, kind: int, shape: tuple[int, ...], offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def header(tensors: list[bytes], keys: list[bytes], version: int = 3) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(keys))
    return b"GGUF" + counts + b"".join(keys) + b"".join(tensors) + bytes(4096)


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"GGUF", "cut off"),
        (b"PK" + bytes(100), "not a GGUF file"),
        (header([], [], version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(99), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(99), "claims .* tensors"),
        (header([], [text("k") + struct.pack("<IQ", 8, 1 << 62)]), "cut off|claims"),
        (header([], [text("k") + struct.pack("<IIQ", 9, 4, 1 << 61)]), "cut off"),
        (header([], [text("k") + struct.pack("<IIQ", 9, 8, 1 << 61)]), "more than fit"),
        (header([], [text("k") + struct.pack("<IIQ", 9, 9, 1) * 50]), "array of arrays"),
        (header([], [text("k") + struct.pack("<I", 77)]), "unknown type 77"),
        (header([], [text("k") + value_bytes(1)] * 2), "twice"),
        (header([entry("t", 0, (1 << 62,))], []), "cut off or damaged"),
        (header([entry("t", 0, (1 << 32, 1 << 32))], []), "cut off or damaged"),
        (header([entry("t", 0, (8,), offset=1 << 50)], []), "cut off or damaged"),
        (header([entry("t", 0, (8,), offset=12)], []), "cut off or damaged"),
        (header([entry("t", 0, (0, 8))], []), "has the shape"),
        (header([entry("t", 2, (48,))], []), "no multiple of 32"),
        (header([entry("t", 10, (256,))], []), "Q2_K; supported"),
        (header([entry("t", 99, (256,))], []), "unknown type 99"),
        (header([entry("t", 0, (2,) * 9)], []), "9 dimensions"),
        (header([entry("t", 0, (8,)), entry("t", 0, (8,), 64)], []), "twice"),
        (header([entry("t", 0, (32,)), entry("u", 0, (8,), 64)], []), "overlap"),
        (header([], [text("general.alignment") + value_bytes(33)]), "alignment"),
        (header([], []), "names none in general.architecture"),
    ],
)
def test_bad_headers_are_refused(tmp_path: Path, content: bytes, pattern: str) -> None:
    refused(tmp_path / "bad.gguf", content, pattern)


@pytest.mark.parametrize(
    ("key", "value", "pattern"),
    [
        ("general.architecture", "clip", "architecture 'clip' in general.architecture; supported"),
        ("llama.block_count", 1 << 31, "claims .* layers"),
        ("llama.context_length", 1 << 31, "claims a context"),
        ("llama.attention.head_count", 0, "head_count is 0"),
        ("llama.embedding_length", "64", "embedding_length is '64'"),
        ("llama.feed_forward_length", 1 << 31, "at most|by the metadata it must be"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "epsilon is nan"),
        ("llama.rope.dimension_count", 8, "not the head dimension"),
        ("llama.rope.scaling.type", "other", "rope scaling 'other'"),
        ("llama.expert_count", 8, "lacks llama.expert_used_count"),
        ("split.count", 3, "one part of several"),
        ("split.count", "3", "split.count is no whole number"),
        ("split.count", [1, 2], "split.count is no whole number"),
    ],
)
def test_bad_metadata_is_refused(tmp_path: Path, key: str, value: object, pattern: str) -> None:
    draft = tiny_llama({"": "Q8_0"})
    draft.metadata[key] = value
    refused(tmp_path / "bad.gguf", draft.content(), pattern)


def test_missing_and_superfluous_tensors_are_refused(tmp_path: Path) -> None:
    draft = tiny_llama({"": "Q8_0"})
    draft.tensors["other.weight"] = draft.tensors.pop("blk.1.ffn_up.weight")
    refused(tmp_path / "a.gguf", draft.content(), "lacks tensors: blk.1.ffn_up.weight")
    draft = tiny_llama({"": "Q8_0"})
    draft.tensors["other.weight"] = Stored.of(torch.ones(4))
    refused(tmp_path / "b.gguf", draft.content(), "no known use: other.weight")


def taken_bytes(path: Path) -> tuple[int, str]:
    """Returns the peak memory of one load, and its error."""
    tracemalloc.start()
    said = ""
    try:
        open_model(str(path), "float32")
        gguf_tokenizer(path).encode("abc d")
    except (ModelError, TokenizerError) as error:
        said = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak, said


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_files_end_in_one_line_and_take_little_memory(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, HEADER_BYTES - 9))
        size = data.draw(st.sampled_from([1, 4, 8]))
        content[at : at + size] = data.draw(st.binary(min_size=size, max_size=size))
    kept = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content[:kept])
    peak, said = taken_bytes(path)
    # tries again, because another thread or a first use may have taken the memory
    if peak >= MOST_TAKEN_BYTES:
        peak, said = taken_bytes(path)
    assert "\n" not in said
    assert peak < MOST_TAKEN_BYTES
