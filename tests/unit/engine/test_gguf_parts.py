"""Tests models in several GGUF files: the same model, and one line for a bad set of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.text.model_error import ModelError
from moonpool_engine.engine.builtin import open_model, open_tokenizer
from moonpool_engine.engine.gguf.files import gguf_file
from moonpool_engine.engine.gguf.part_names import MAX_PARTS, part_names
from moonpool_engine.engine.gguf.reader import read_gguf
from moonpool_engine.engine.tensors import tensor_shapes
from tests.unit.engine.gguf_files import GgufDraft, Stored, tiny_llama, write_parts

KINDS = {"": "Q8_0", "ffn_up": "Q4_K", "attn_v": "F32"}
FIRST, SECOND = "m-00001-of-00003.gguf", "m-00002-of-00003.gguf"


def draft() -> GgufDraft:
    return tiny_llama(KINDS, 256, 256)


@pytest.mark.parametrize("first_is_empty", [False, True])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_parts_are_the_whole_model(tmp_path: Path, count: int, first_is_empty: bool) -> None:
    whole = open_model(str(draft().write(tmp_path / "whole.gguf")), "float32")
    path = str(draft().write_parts(tmp_path, count, first_is_empty))
    parts = open_model(path, "float32")
    assert parts.spec == whole.spec
    # equal fingerprints allow both to share a KVCache
    assert parts.fingerprint == whole.fingerprint
    for name in tensor_shapes(whole.spec):
        assert torch.equal(parts.weights.load(name), whole.weights.load(name)), name
    parts.release()
    name = "model.embed_tokens.weight"
    assert torch.equal(parts.weights.load(name), whole.weights.load(name))
    words = open_tokenizer(parts.tokenizer, parts.spec.vocab_size)
    assert words.encode("abc") == [257]


def test_every_part_is_read_from_its_own_file(tmp_path: Path) -> None:
    path = draft().write_parts(tmp_path, 3)
    file = read_gguf(path)
    assert [part.path.name[:7] for part in file.parts] == ["m-00001", "m-00002", "m-00003"]
    assert {entry.part for entry in file.tensors.values()} == {0, 1, 2}
    own = [name for name, entry in file.tensors.items() if entry.part == 1]
    assert own == list(draft().parts(3)[1].tensors)


def without(key: str, part: int) -> Callable[[list[GgufDraft]], None]:
    def change(drafts: list[GgufDraft]) -> None:
        del drafts[part].metadata[key]

    return change


def with_value(key: str, part: int, value: object) -> Callable[[list[GgufDraft]], None]:
    def change(drafts: list[GgufDraft]) -> None:
        drafts[part].metadata[key] = value

    return change


def doubled(drafts: list[GgufDraft]) -> None:
    drafts[2].tensors["token_embd.weight"] = drafts[0].tensors["token_embd.weight"]


def lost(drafts: list[GgufDraft]) -> None:
    drafts[2].tensors.popitem()


def swapped(drafts: list[GgufDraft]) -> None:
    drafts[1:] = drafts[:0:-1]


def extra(drafts: list[GgufDraft]) -> None:
    drafts[1].tensors["more.weight"] = Stored.of(torch.ones(4))


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (doubled, f"{FIRST} and .*m-00003-of-00003.gguf both have the tensor 'token_embd.weight'"),
        (lost, "3 parts of .* have 19 tensors, but split.tensors.count is 20"),
        (extra, "have 21 tensors, but split.tensors.count is 20"),
        (swapped, f"{SECOND} is no part of this model: its split.no is 2, not 1"),
        (without("split.no", 1), f"{SECOND} is no part of this model: its split.no is missing"),
        (without("split.count", 2), "split.count is missing, not 3"),
        (with_value("split.count", 1, 4), "split.count is 4, not 3"),
        (with_value("split.count", 0, 4), "one part of several .split.count is 4.: keep the names"),
        (with_value("split.no", 0, 1), f"{FIRST} is no part of this model: its split.no is 1"),
        (with_value("split.no", 1, "1"), "split.no is no whole number"),
        (with_value("split.tensors.count", 0, [20]), "split.tensors.count is no whole number"),
        (with_value("general.alignment", 1, 33), f"{SECOND} has the alignment 33"),
    ],
)
def test_a_bad_set_is_one_line(
    tmp_path: Path, change: Callable[[list[GgufDraft]], None], pattern: str
) -> None:
    drafts = draft().parts(3)
    change(drafts)
    refused(write_parts(drafts, tmp_path), pattern)


def refused(path: Path, pattern: str) -> None:
    with pytest.raises(ModelError, match=pattern) as found:
        open_model(str(path), "float32")
    assert "\n" not in str(found.value)


def test_missing_and_damaged_parts_are_named(tmp_path: Path) -> None:
    path = draft().write_parts(tmp_path, 3)
    second = tmp_path / SECOND
    refused(second, f"is not the first part of the model: give {FIRST}")
    content = second.read_bytes()
    second.write_bytes(content[:-4000])
    refused(path, f"{SECOND} tensor .* the file is cut off or damaged")
    second.write_bytes(b"")
    refused(path, f"{SECOND} is cut off")
    second.unlink()
    refused(path, f"of which 1 are missing in its folder, first {SECOND}")
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    refused(tmp_path / "other.gguf", "is one part of several")


def test_a_part_that_changes_while_it_is_loaded_is_noticed(tmp_path: Path) -> None:
    model = open_model(str(draft().write_parts(tmp_path, 3)), "float32")
    third = tmp_path / "m-00003-of-00003.gguf"
    content = third.read_bytes()
    third.unlink()
    third.write_bytes(content)
    with pytest.raises(ModelError, match=r"m-00003-of-00003\.gguf changed while"):
        model.weights.load("model.layers.1.mlp.down_proj.weight")


def message_of(path: Path) -> str:
    """Returns the refusal, or "" if the model opens."""
    try:
        open_model(str(path), "float32")
    except ModelError as error:
        return str(error)
    return ""


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_parts_end_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Changes bytes of the headers, or cuts a part off anywhere."""
    folder = tmp_path_factory.mktemp("damaged")
    drafts = tiny_llama({"": "Q8_0"}).parts(3)
    path = write_parts(drafts, folder)
    number = data.draw(st.integers(0, 2))
    part = sorted(folder.iterdir())[number]
    content = bytearray(part.read_bytes())
    at = data.draw(st.integers(0, len(drafts[number].header()) - 1))
    if data.draw(st.booleans()):
        content[at] = data.draw(st.integers(0, 255))
    else:
        del content[at:]
    part.write_bytes(content)
    assert "\n" not in message_of(path)


def test_names_of_parts() -> None:
    names = [f"a-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    assert part_names("a-00002-of-00003.gguf") == names
    for whole in ("a.gguf", "a-00004-of-00003.gguf", "a-00000-of-00003.gguf", "a-1-of-3.gguf"):
        assert part_names(whole) == [whole]
    assert part_names(f"a-00001-of-{MAX_PARTS + 1:05}.gguf") == [
        f"a-00001-of-{MAX_PARTS + 1:05}.gguf"
    ]


def test_all_parts_are_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def download(repo: str, file: str) -> str:
        seen.append(f"{repo}:{file}")
        return f"/cache/{file}"

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert gguf_file("org/repo:Q4/m-00001-of-00002.gguf") == Path("/cache/Q4/m-00001-of-00002.gguf")
    assert seen == ["org/repo:Q4/m-00001-of-00002.gguf", "org/repo:Q4/m-00002-of-00002.gguf"]
    with pytest.raises(ModelError, match=r"give org/repo:Q4/m-00001-of-00002\.gguf"):
        gguf_file("org/repo:Q4/m-00002-of-00002.gguf")
