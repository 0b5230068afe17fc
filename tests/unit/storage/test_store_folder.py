"""Tests folders that the store cannot use: each is refused with one line that says what to do, and
its content stays unchanged."""

from __future__ import annotations

import errno
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from store_harness import Bench, make_layout

from moonpool_engine.storage import segments, store_folder
from moonpool_engine.storage.folder import StoreError, explain, instance_folder, stores_below
from moonpool_engine.storage.verify import clear_folder, verify_folder

NOBODY = 65534


def refusal(root: Path, **arguments: object) -> str:
    with pytest.raises(StoreError) as caught:
        Bench(root, **arguments)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    assert str(root) in text
    return text


def used_folder(root: Path) -> Path:
    bench = Bench(root)
    bench.put({0: 0, 1: 1})
    bench.store.close()
    return bench.store.folder


def contents(folder: Path) -> dict[str, bytes]:
    names = ("index", "segment-000000")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def test_only_the_owner_can_access_the_files(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        folder = used_folder(tmp_path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize(
    "layout", [make_layout(model="other"), make_layout(512), make_layout(256, num_layers=4)]
)
@pytest.mark.parametrize("with_index", [True, False])
def test_blocks_of_another_model_are_not_changed(
    tmp_path: Path, layout: object, with_index: bool
) -> None:
    folder = used_folder(tmp_path)
    if not with_index:
        (folder / "index").unlink()
    before = contents(folder)
    text = refusal(tmp_path, layout=layout)
    assert "another model" in text
    assert f"moonpool pool clear {folder}" in text
    assert contents(folder) == before
    clear_folder(folder)
    assert Bench(tmp_path, layout=layout).stored == []  # type: ignore[arg-type]


def test_another_version_is_named(tmp_path: Path) -> None:
    folder = used_folder(tmp_path)
    head = bytearray((folder / "index").read_bytes())
    head[8:12] = struct.pack("<I", 7)
    head[64:72] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(head[:64])))
    (folder / "index").write_bytes(head)
    assert "version 7" in refusal(tmp_path)
    with pytest.raises(StoreError, match="version 7"):
        verify_folder(folder)


@pytest.mark.long
def test_two_instances_cannot_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Bench(tmp_path)
    code = (
        "import sys; from pathlib import Path; from store_harness import Bench\n"
        "from moonpool_engine.storage.folder import StoreError\n"
        "try: Bench(Path(sys.argv[1]))\n"
        "except StoreError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    assert f"in use by process {os.getpid()}" in done.stdout
    for act in (verify_folder, clear_folder):
        with pytest.raises(StoreError, match="in use"):
            act(first.store.folder)
    first.store.close()
    Bench(tmp_path).store.close()


def test_a_folder_that_others_can_access_is_refused(tmp_path: Path) -> None:
    folder = used_folder(tmp_path)
    folder.chmod(0o755)
    assert "chmod 700" in refusal(tmp_path)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    instance_folder(tmp_path, "prefill-0").write_text("")
    assert refusal(tmp_path)
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_without_the_right_to_write_is_named(tmp_path: Path) -> None:
    folder = used_folder(tmp_path)
    os.seteuid(NOBODY)
    try:
        assert "right to write" in refusal(tmp_path)
        assert "right to write" in refusal(tmp_path / "new")
    finally:
        os.seteuid(0)
    os.chown(folder, NOBODY, NOBODY)
    assert "belong" in refusal(tmp_path)


def test_a_file_system_that_cannot_be_written_is_named_as_that() -> None:
    text = explain(Path("/data/kv"), OSError(errno.EROFS, os.strerror(errno.EROFS)))
    assert text.startswith("/data/kv is read-only") and "right" not in text


def test_a_disk_that_is_too_small_is_reported_with_the_missing_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = 1 << 40
    text = refusal(tmp_path, num_slots=slots)
    assert "full" in text
    assert "GiB" in text
    assert "pool.ssd_tokens_per_instance" in text


def test_a_folder_that_fails_while_it_is_opened_is_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store_folder, "open_index", broken)
    assert "Input/output" in refusal(tmp_path)
    monkeypatch.undo()
    Bench(tmp_path)


def test_names_of_instances_stay_inside_the_folder(tmp_path: Path) -> None:
    for name in ("..", ".", "", "a/b", "/etc", "a\nb", "ü" * 20):
        folder = instance_folder(tmp_path, name)
        assert folder.parent == tmp_path
        assert folder.name not in ("", ".", "..")
    assert instance_folder(tmp_path, "a.b") != instance_folder(tmp_path, "a%2Eb")


def test_stores_are_found_below_a_folder(tmp_path: Path) -> None:
    folder = used_folder(tmp_path)
    (tmp_path / "other").mkdir()
    assert stores_below(tmp_path) == stores_below(folder) == [folder]
    assert stores_below(tmp_path / "other") == []
    with pytest.raises(StoreError, match="gone"):
        stores_below(tmp_path / "nowhere")
    with pytest.raises(StoreError):
        clear_folder(tmp_path)
    assert verify_folder(folder).blocks == 2


def test_the_disk_is_measured_once_a_week(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def rate(path: Path, flags: int) -> float:
        measured.append(flags)
        return 5e8

    monkeypatch.setattr(segments, "_read_rate", rate)
    found = segments.probe_disk(tmp_path, 4096)
    path = tmp_path / segments.PROBE_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert segments.probe_disk(tmp_path, 4096) == found and len(measured) == 1
    assert not segments.probe_disk(tmp_path, 100).direct, "not whole pages"
    for damage in (b"", b"{}", b"\xff", bytes(8 << 20), b'{"read_bytes_per_s": 0}'):
        path.write_bytes(damage)
        assert segments.probe_disk(tmp_path, 4096) == found
    times = len(measured)
    old_s = path.stat().st_mtime - 8 * 86400
    os.utime(path, (old_s, old_s))
    assert segments.probe_disk(tmp_path, 4096) == found and len(measured) == times + 1
