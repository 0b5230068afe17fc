"""Tests `make release`: one version everywhere, equal bytes for equal files, and a list of parts
with their hashes."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

import image
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


def test_without_buildah_a_candidate_goes_on_and_a_tag_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    release.pack_image(tmp_path, "1.2.3", 1, "debian", needed=False)
    said = "no image in this candidate: apt-get install buildah mmdebstrap\n"
    assert capsys.readouterr().out == said and not [*tmp_path.iterdir()]
    with pytest.raises(release.ReleaseError, match=r"install buildah; or IMAGE_BASE=none$"):
        release.pack_image(tmp_path, "1.2.3", 1, release.BASE, needed=True)


def test_the_parts_of_an_image_are_listed_by_what_its_files_say(tmp_path: Path) -> None:
    status = tmp_path / "var/lib/dpkg/status"
    status.parent.mkdir(parents=True)
    status.write_text(
        "Package: libc6\nStatus: install ok installed\nVersion: 2.36-9\nDescription: a\n b\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n\n"
    )
    for folder, name in (("usr/local/lib/python3.11/site-packages", "a"), ("usr/lib/x", "b")):
        facts = tmp_path / folder / f"{name}-2.0.dist-info" / "METADATA"
        facts.parent.mkdir(parents=True)
        facts.write_text(f"Name: {name}\nVersion: 2.0\n")
    found = image.Image("sha256:00ff", *image.parts_of(tmp_path))
    bill = release.bill_of_image("1.2.3", found)
    assert [part["purl"] for part in bill["components"]] == [
        "pkg:deb/debian/libc6@2.36-9",
        "pkg:pypi/a@2.0",
    ]
    assert bill["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": "00ff"}]


def test_the_archive_of_an_image_has_equal_bytes(tmp_path: Path) -> None:
    packed = []
    for number in range(2):
        layout = tmp_path / str(number)
        (layout / "blobs").mkdir(parents=True)
        for name in ("index.json", "blobs/x")[:: 1 if number else -1]:
            (layout / name).write_text(name)
            os.utime(layout / name, (number, number))
        image.pack(layout, tmp_path / f"{number}.tar", 1_000_000)
        packed.append((tmp_path / f"{number}.tar").read_bytes())
    assert packed[0] == packed[1]


def test_the_containerfile_copies_only_what_the_context_has() -> None:
    root = Path(release.ROOT)
    allowed = {line[1:] for line in (root / ".dockerignore").read_text().split() if line[0] == "!"}
    lines = image.CONTAINERFILE.read_text().splitlines()
    copied = [
        w
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for w in line.split()[1:-1]
    ]
    assert copied and {*copied} == allowed
