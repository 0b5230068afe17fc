"""Tests files that come with a model: a wrong value gives one line with the file's name, and no
path leads out of the model's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from moonpool.text import shown
from moonpool.text.model_error import ModelError
from moonpool.text.model_folder import MAX_TEXT_BYTES, file_in, read_value
from moonpool.text.model_info import read_model_info
from moonpool.text.tokenizer import TokenizerError
from moonpool.text.tokenizers.huggingface import HfTokenizer
from moonpool_engine.engine.builtin import export_checkpoint, open_model
from moonpool_engine.engine.pooling import stored_pooling
from tests.unit.engine.test_tokenizer_huggingface import byte_level, write_folder

NAME = "random:hidden=64,layers=1,heads=4,kv_heads=2,inter=96,vocab=300,context=256"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    export_checkpoint(open_model(NAME, "float32"), made)
    return write_folder(made, byte_level())


def refusal(open_it: Callable[[], Any]) -> str:
    with pytest.raises((ModelError, TokenizerError)) as caught:
        open_it()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600
    return text


def write_index(folder: Path, file: Any) -> Callable[[], Any]:
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, file)}
    (folder / INDEX).write_text(json.dumps(index))
    return lambda: open_model(str(folder), "float32")


@pytest.mark.parametrize("file", [5, None, [], {"a": 1}, True, 1.5])
def test_a_file_in_weight_map_that_is_no_name(folder: Path, file: Any) -> None:
    text = refusal(write_index(folder, file))
    assert INDEX in text and "weight_map" in text and repr(file) in text


@pytest.mark.parametrize(
    "file", ["../secret", "/etc/passwd", "a/../../secret", "..", "\0", "x" * 5000, "\nfake line"]
)
def test_a_path_in_weight_map_that_leads_elsewhere(folder: Path, file: str) -> None:
    (folder.parent / "secret").write_bytes((folder / "model.safetensors").read_bytes())
    refusal(write_index(folder, file))


def test_a_path_within_the_folder_is_read(folder: Path) -> None:
    (folder / "parts").mkdir()
    (folder / "model.safetensors").rename(folder / "parts" / "one.safetensors")
    (folder / "model.safetensors").symlink_to("parts/one.safetensors")
    assert write_index(folder, "parts/../parts/one.safetensors")().spec.num_layers == 1


LINKED = [
    ("config.json", lambda folder: open_model(str(folder), "float32")),
    ("model.safetensors", lambda folder: open_model(str(folder), "float32")),
    ("generation_config.json", lambda folder: open_model(str(folder), "float32")),
    ("modules.json", stored_pooling),
    ("tokenizer.json", HfTokenizer),
    ("tokenizer_config.json", HfTokenizer),
    ("special_tokens_map.json", HfTokenizer),
    ("chat_template.jinja", HfTokenizer),
]


@pytest.mark.parametrize(("name", "open_it"), LINKED)
def test_a_link_out_of_the_folder_is_not_followed(
    folder: Path, name: str, open_it: Callable[[Path], Any]
) -> None:
    outside = folder.parent / "outside"
    outside.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    text = refusal(lambda: open_it(folder))
    assert name in text and "lies outside" in text


def test_the_cache_of_hugging_face_links_to_its_blobs(folder: Path) -> None:
    root = folder.parent / "models--a--b"
    (root / "blobs").mkdir(parents=True)
    snapshot = root / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(folder.iterdir()):
        path.rename(root / "blobs" / str(number))
        (snapshot / path.name).symlink_to(os.path.join("..", "..", "blobs", str(number)))
    assert open_model(str(snapshot), "float32").spec.num_layers == 1
    assert HfTokenizer(snapshot).vocab_size > 0
    (snapshot / "chat_template.jinja").symlink_to(folder.parent / "secret")
    assert "lies outside" in refusal(lambda: HfTokenizer(snapshot))


def test_loops_pipes_and_huge_or_deep_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "generation_config.json"
    for make in (
        lambda: path.symlink_to(path.name),
        lambda: os.mkfifo(path),
        lambda: path.mkdir(),
        lambda: path.write_text("[" * 100_000),
        lambda: path.write_text('{"a": "\\ud800"}'),
        lambda: path.write_text("9" * 5000),
        lambda: path.write_bytes(b"\xff\xfe"),
        lambda: path.write_text("[]"),
        lambda: os.truncate(path, MAX_TEXT_BYTES + 1),
    ):
        make()
        assert path.name in refusal(lambda: open_model(str(folder), "float32"))
        if not path.is_file() or path.is_symlink():
            path.rmdir() if path.is_dir() else path.unlink()


WORDS: list[tuple[str, Any, str]] = [
    ("generation_config.json", {"eos_token_id": [[1]]}, "eos_token_id is [[1]]"),
    ("generation_config.json", {"eos_token_id": {"a": 1}}, "eos_token_id is {'a': 1}"),
    ("generation_config.json", {"eos_token_id": 2**40}, "eos_token_id is 1099511627776"),
    ("tokenizer_config.json", {"chat_template": 5}, "chat_template is 5, not a text"),
    ("tokenizer_config.json", {"chat_template": [5]}, "chat_template is [5], not a list of obj"),
    (
        "tokenizer_config.json",
        {"chat_template": [{"name": [], "template": ""}]},
        "chat_template[0].name is [], not a text",
    ),
    ("modules.json", [5], "holds no list of objects"),
    ("modules.json", [{"type": 5}], "[0].type is 5, not a text"),
    ("modules.json", [{"type": "a.Pooling", "path": "../.."}], "lies outside"),
    ("modules.json", [{"type": "a.Pooling", "path": "nowhere"}], "nowhere/config.json"),
]


@pytest.mark.parametrize(("name", "value", "says"), WORDS)
def test_a_wrong_word_is_named_with_its_file(
    folder: Path, name: str, value: Any, says: str
) -> None:
    (folder / name).write_text(json.dumps(value))

    def open_all() -> None:
        open_model(str(folder), "float32")
        read_model_info(str(folder))
        HfTokenizer(folder)

    text = refusal(open_all)
    assert says in text and str(folder) in text


def change_tokenizer(folder: Path, **changes: Any) -> Callable[[], Any]:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return lambda: HfTokenizer(folder)


def test_a_decoder_that_could_take_any_time_or_memory_is_refused(folder: Path) -> None:
    def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": pattern, "content": content}

    regex = replace({"Regex": "(a+)+$"}, "b")
    assert "regular expression" in refusal(change_tokenizer(folder, decoder=regex))
    nested = {"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": [regex]}]}
    assert "regular expression" in refusal(change_tokenizer(folder, decoder=nested))
    doubling = {"type": "Sequence", "decoders": [replace({"String": "a"}, "aa")] * 40}
    assert "times as long" in refusal(change_tokenizer(folder, decoder=doubling))
    between = replace({"String": ""}, "a" * 10**6)
    assert "times as long" in refusal(change_tokenizer(folder, decoder=between))


def test_a_vocabulary_that_nothing_can_hold_is_refused(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    far = model | {"vocab": model["vocab"] | {"far": 2**31}}
    assert "at most 16777216 tokens" in refusal(change_tokenizer(folder, model=far))
    long = model | {"vocab": model["vocab"] | {"l" * 10**6: 5000}}
    assert "a token of 1000000 characters" in refusal(change_tokenizer(folder, model=long))


def test_values_in_errors_are_short_and_in_one_line() -> None:
    for value in ("a\nb", "x" * 10**6, [[[["y" * 1000]]]] * 1000, {"\0": "\ud800"}, 10**100):
        text = shown.shown(value)
        assert len(text) < 100 and text.isprintable()
    assert shown.shown_name("model.layers.0") == "model.layers.0"
    assert shown.listed(["a", "b\n", *"cdefg"]) == "a, 'b\\n', c, d, e and 2 more"


def test_a_file_is_found_where_it_is_or_said_to_be_absent(folder: Path) -> None:
    assert file_in(folder, "config.json") == folder / "config.json"
    with pytest.raises(FileNotFoundError):
        read_value(file_in(folder, "none.json"))
