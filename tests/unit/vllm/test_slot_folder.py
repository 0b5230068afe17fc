"""Tests the folder of saved slots: a damaged or foreign slot, or one beyond the limit, is a
miss."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from moonpool.protocol.block_layout import block_keys, root_key
from moonpool.vllm.slot_folder import STRAY_S, SlotFolder, SlotFolderError
from moonpool.vllm.slot_identity import identity_of, weights_digest
from moonpool.vllm.slot_table import Held, Prompt, held_by

BLOCK = 16
MODEL = b"model"


def held(seed: int = 0, identity: bytes = MODEL) -> Held:
    tokens = tuple(range(seed, seed + 300))
    root = root_key(b"layout", "")
    return held_by(Prompt(tokens, root, tuple(block_keys(tokens, BLOCK, root)), identity), BLOCK)


def put(folder: SlotFolder, one: Held, content: bytes = b"state" * 100) -> Path:
    """Saves a slot like a server."""
    path = folder.path / folder.file_name(one.name)
    content = b"ggsq" + array("I", one.token_ids).tobytes() + content
    path.write_bytes(content)
    assert folder.admit(one, len(content))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> SlotFolder:
    return SlotFolder(str(tmp_path), BLOCK)


def test_files_are_found_again(folder: SlotFolder) -> None:
    one, other = held(), held(5)
    put(folder, one)
    put(folder, other)
    put(folder, held(9, b"another model"))
    again = SlotFolder(str(folder.path), BLOCK)
    found = {file.name: file for file in again.scan(frozenset([MODEL]))}
    assert found.keys() == {one.name, other.name}
    assert found[one.name].keys == one.keys and found[one.name].num_tokens == 300
    assert again.is_intact(found[one.name])
    assert SlotFolder(str(folder.path), 2 * BLOCK).scan(frozenset([MODEL])) == []


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def linked(path: Path) -> None:
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit": flipped,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a link": linked,
    "a folder": a_folder,
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("of", ["data", "note"])
@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_a_miss(folder: SlotFolder, of: str, how: str) -> None:
    one = held()
    data = put(folder, one)
    DAMAGE[how](data if of == "data" else data.with_suffix(".note"))
    found = folder.scan(frozenset([MODEL]))
    assert [file.name for file in found] == ([one.name] if of == "data" else [])
    assert not folder.is_intact(one)
    if how != "a folder":
        assert not data.exists() and folder.scan(frozenset([MODEL])) == []


def test_any_bit_of_a_note_counts(folder: SlotFolder) -> None:
    one = held()
    note = put(folder, one).with_suffix(".note")
    right = note.read_bytes()
    for place in range(0, len(right), 7):
        wrong = bytearray(right)
        wrong[place] ^= 4
        note.write_bytes(wrong)
        found = folder.scan(frozenset([MODEL]))
        assert not found or (found == [folder_held(one)] and not folder_intact(folder, one, right))


def folder_held(one: Held) -> Held:
    return Held(one.root, one.keys, one.num_tokens, one.name)


def folder_intact(folder: SlotFolder, one: Held, right: bytes) -> bool:
    """Returns whether a slot's file is intact, and restores the file and its note, which the check
    may delete."""
    data = folder.path / folder.file_name(one.name)
    content = data.read_bytes()
    is_intact = folder.is_intact(one)
    data.write_bytes(content)
    data.with_suffix(".note").write_bytes(right)
    return is_intact


def test_a_note_of_other_tokens_is_none(folder: SlotFolder) -> None:
    one, other = held(), held(5)
    first, second = put(folder, one), put(folder, other)
    second.with_suffix(".note").write_bytes(first.with_suffix(".note").read_bytes())
    assert [file.name for file in folder.scan(frozenset([MODEL]))] == [one.name]


def test_a_file_of_another_size_than_the_server_said_is_not_taken(folder: SlotFolder) -> None:
    one = held()
    path = folder.path / folder.file_name(one.name)
    path.write_bytes(b"short")
    assert not folder.admit(one, 6)
    assert not path.exists()


def test_a_slot_that_another_client_has_used_is_not_taken(folder: SlotFolder) -> None:
    one, other = held(), held(5)
    path = put(folder, other)
    taken = path.rename(folder.path / folder.file_name(one.name))
    assert not folder.admit(one, taken.stat().st_size)
    assert not taken.exists()


def test_the_folder_is_bounded_by_last_use(tmp_path: Path) -> None:
    folder = SlotFolder(str(tmp_path), BLOCK, max_bytes=14_800)
    files = [held(5 * number) for number in range(4)]
    for number, one in enumerate(files):
        path = put(folder, one, bytes(2000))
        for each in (path, path.with_suffix(".note")):
            os.utime(each, (1000 + number, 1000 + number))
    # each file has a note of 1.3 kB, so the four do not fit
    assert folder.bound() == (files[0].name,)
    assert folder.is_intact(folder_held(files[1]))  # used slots
    put(folder, held(50), bytes(2000))
    assert folder.bound() == (files[2].name,)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(sizes) <= 14_800


def test_only_own_files_are_touched(tmp_path: Path) -> None:
    (tmp_path / "letter.slot").write_text("mine")
    (tmp_path / "moonpool-plan.txt").write_text("mine")
    folder = SlotFolder(str(tmp_path), BLOCK, max_bytes=1)
    put(folder, held())
    folder.bound()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letter.slot", "moonpool-plan.txt"]


def test_strays_go_after_a_while(folder: SlotFolder) -> None:
    fresh, old = (folder.path / folder.file_name(f"{number:040x}") for number in range(2))
    fresh.write_bytes(b"being written")
    old.write_bytes(b"left over")
    before_s = time.time() - STRAY_S - 10
    os.utime(old, (before_s, before_s))
    folder.scan(frozenset())
    assert fresh.exists() and not old.exists()


def test_no_folder_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "no", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(SlotFolderError, match="no folder") as raised:
            SlotFolder(str(path), BLOCK)
        assert "\n" not in str(raised.value)


def test_a_model_is_its_weights_and_what_it_computes(tmp_path: Path) -> None:
    weights = tmp_path / "m.gguf"
    weights.write_bytes(b"weights")
    digest = weights_digest(weights)
    likely = {number: -1.0 - number for number in range(16)}
    one = identity_of(tmp_path, digest, likely)
    noisy = {number: logprob + 0.01 for number, logprob in likely.items()}
    assert identity_of(tmp_path, digest, noisy) == one
    noisy[99] = noisy.pop(15)  # the least likely slot may be another
    assert identity_of(tmp_path, digest, noisy) == one
    changed = {**likely, 3: -4.2}
    other = identity_of(tmp_path, digest, changed)
    assert other != one and identity_of(tmp_path, digest, changed) == other
    weights.write_bytes(b"weightz")
    assert weights_digest(weights) != digest
    assert identity_of(tmp_path, weights_digest(weights), likely) not in (one, other)
    for mark in tmp_path.glob("*.model"):
        mark.write_bytes(b"garbage")
    assert identity_of(tmp_path, digest, likely) != one  # misses, because the slot was forgotten


def test_all_parts_of_the_weights_count(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"part")
    before = weights_digest(parts[0])
    parts[1].write_bytes(b"trap")
    assert weights_digest(parts[0]) != before
    parts[1].unlink()
    with pytest.raises(OSError):
        weights_digest(parts[0])


def test_notes_are_small(folder: SlotFolder) -> None:
    one = held()
    note = put(folder, one).with_suffix(".note")
    assert len(note.read_bytes()) < 4 * one.num_tokens + 300
    assert note.stat().st_mode & 0o077 == 0
    note.write_bytes(msgspec.msgpack.encode([1] * 9_000_000))
    assert folder.scan(frozenset([MODEL])) == []
