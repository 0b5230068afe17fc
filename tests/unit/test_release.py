"""`make release`: one version, equal bytes for equal files, a list of parts with their hashes."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

import release


def test_all_places_state_one_version() -> None:
    assert release.one_version(release.versions())


def test_versions_that_differ_are_named() -> None:
    with pytest.raises(release.ReleaseError, match=r"setup.py 0.2.0"):
        release.one_version(release.versions() | {"setup.py": "0.2.0"})


def test_equal_files_give_equal_bytes(tmp_path: Path) -> None:
    packed = []
    for number in range(2):
        folder = tmp_path / str(number)
        (folder / "sub").mkdir(parents=True)
        for name in ("b", "a", "sub/c")[:: 1 if number else -1]:
            (folder / name).write_text(name)
            os.utime(folder / name, (number, number))
        target = tmp_path / f"{number}.tgz"
        release.pack(folder, target, "top", 1_000_000)
        packed.append(target.read_bytes())
    assert packed[0] == packed[1]
    with tarfile.open(target) as archive:
        assert archive.getnames() == ["top/a", "top/b", "top/sub/c"]


def test_each_locked_package_is_listed_with_its_hashes() -> None:
    parts = release.bill_of_materials("1.2.3")["components"]
    assert len(parts) == len(release.read_lock(release.RUNS))
    assert all(part["hashes"] and part["version"] for part in parts)
    numpy = next(part for part in parts if part["name"] == "numpy")
    assert numpy["purl"] == f"pkg:pypi/numpy@{numpy['version']}"
    assert "BSD" in numpy["licenses"][0]["license"]["name"]


def test_checksums_are_those_that_sha256sum_compares(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    (tmp_path / "SHA256SUMS").write_text("old")
    release.write_checksums(tmp_path)
    assert (tmp_path / "SHA256SUMS").read_text() == f"{hashlib.sha256(b'1').hexdigest()}  x\n"


def test_an_sdist_is_the_same_whoever_built_it_when(tmp_path: Path) -> None:
    for folder, names, mtime, mode in (("a", "xyz", 1.5, 0o664), ("b", "zyx", 9.0, 0o640)):
        (tmp_path / folder).mkdir()
        with tarfile.open(tmp_path / folder / "s.tar.gz", "w:gz") as archive:
            for name in names:
                entry = tarfile.TarInfo(f"{'long' * 40}/{name}")
                entry.mtime, entry.mode, entry.uname, entry.size = mtime, mode, folder, 2
                archive.addfile(entry, io.BytesIO(b"%s\n" % name.encode()))
        release.settle(tmp_path / folder / "s.tar.gz", 1_000_000)
    first, second = (tmp_path / folder / "s.tar.gz" for folder in "ab")
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as archive:
        assert [entry.name[-1] for entry in archive] == ["x", "y", "z"]
        assert {(entry.mtime, entry.mode, entry.uname) for entry in archive} == {
            (1_000_000, 0o644, "")
        }
    release.settle(tmp_path / "none.tar.gz", 1)


def test_a_wheel_is_the_same_whatever_its_builders_umask(tmp_path: Path) -> None:
    for name, kept in (("a", 0o777), ("b", 0o700)):
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            for path, mode in (("p/", 0o40755), ("p/x.py", 0o100644), ("p/run", 0o100755)):
                entry = zipfile.ZipInfo(path, (2026, 1, 2, 3, 4, 6))
                entry.external_attr = (mode & ~0o777 | mode & kept) << 16
                archive.writestr(entry, b"" if path == "p/" else b"text " * 99)
        release.settle_wheel(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with zipfile.ZipFile(tmp_path / "b") as archive:
        modes = [oct(entry.external_attr >> 16) for entry in archive.infolist()]
        assert archive.testzip() is None and modes == ["0o40755", "0o100644", "0o100755"]
