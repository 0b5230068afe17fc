"""Tests runs of other projects' server tests: which files are fetched, which tests are left out,
and the flags."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from benchmarks.peer_tests import archives, translated
from benchmarks.peer_tests.archives import ArchiveError, check, unpack, unpacked
from benchmarks.peer_tests.running import read_results
from benchmarks.peer_tests.suites import (
    HERE,
    OWN,
    SUITES,
    Skip,
    Suite,
    SuiteError,
    parse,
    read_suite,
)
from benchmarks.peer_tests.table import merged, table
from benchmarks.peer_tests.translated import FlagError

TEST = "unit/test_basic.py::test_load[a-1]"
HEAD = 'title = "T"\nurl = "https://x.invalid/t-1.tar.gz"\nsha256 = "00"\nroot = "."\n'


@pytest.mark.parametrize(
    ("pattern", "does"),
    [
        (TEST, True),
        ("unit/test_basic.py::test_load*", True),
        ("unit/*::test_load[[]a-1]", False),  # brackets in this form stand for themselves
        ("unit/test_basic.py", True),
        ("unit/*", True),
        ("unit/test_basi", False),
        ("unit/test_basic.py::test_loa", False),
        ("*::*[a-1]", True),
        ("*::*[b-1]", False),
    ],
)
def test_a_skip_names_tests_by_stars_alone(pattern: str, does: bool) -> None:
    assert Skip(pattern, "why").matches(TEST) is does


def test_the_first_skip_counts_and_those_without_a_test_are_found() -> None:
    text = HEAD + '[[skip]]\nreason = "a"\ntests = ["x.py::test_a*", "y.py::test_gone"]\n'
    text += '[[skip]]\nreason = "b"\ntests = ["x.py", "z.py"]\n'
    suite = parse("t", text)
    first, second = suite.skip("x.py::test_ab"), suite.skip("x.py::test_b")
    assert first is not None and first.reason == "a"
    assert second is not None and second.reason == "b"
    assert suite.skip("w.py::test_b") is None
    assert suite.unmatched(["x.py::test_ab"]) == ["y.py::test_gone", "z.py"]


@pytest.mark.parametrize(
    "text",
    [
        "title = ",
        'title = "T"\n',
        HEAD + 'colour = "blue"\n',
        HEAD + '[[skip]]\nreason = ""\ntests = ["a"]\n',
        HEAD + '[[skip]]\nreason = "a"\ntests = []\n',
        HEAD + '[[skip]]\nreason = "a"\ntests = ["a", "a"]\n',
        HEAD + '[[skip]]\nreason = "a"\n',
    ],
)
def test_a_wrong_list_is_an_error(text: str) -> None:
    with pytest.raises(SuiteError, match=r"t\.toml"):
        parse("t", text)


def test_the_lists_of_this_repository_are_right() -> None:
    for name in SUITES:
        suite = read_suite(name)
        assert len(suite.sha256) == 64 and suite.url.endswith(".tar.gz")
        assert suite.members and suite.tests and suite.skips
    packages = (HERE / "packages.txt").read_text().splitlines()
    assert all("==" in line for line in packages if not line.startswith("#"))


def archive(folder: Path, members: dict[str, bytes], links: dict[str, str] | None = None) -> Path:
    path = folder / "t-1.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return path


def test_only_the_wanted_regular_files_are_unpacked(tmp_path: Path) -> None:
    members = {"t-1/tests/a.py": b"a", "t-1/src/b.py": b"b", "t-1/tests_more/c.py": b"c"}
    links = {"t-1/tests/link.py": "/etc/passwd"}
    unpack(archive(tmp_path, members, links), ("tests/",), tmp_path / "out")
    found = [p for p in (tmp_path / "out").rglob("*") if not p.is_dir()]
    assert [str(p.relative_to(tmp_path / "out")) for p in found] == ["tests/a.py"]


@pytest.mark.parametrize("name", ["t-1/tests/../../evil.py", "t-1//etc/evil.py", "/x/../../evil"])
def test_a_member_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    path = archive(tmp_path, {name: b"x"})
    inner = name.partition("/")[2]
    with pytest.raises(ArchiveError, match="leaves"):
        unpack(path, (inner,), tmp_path / "deep" / "out")
    assert not list(tmp_path.rglob("evil*"))


def test_archives_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path, {f"t-1/tests/{i}.py": b"x" * 100 for i in range(5)})
    monkeypatch.setattr(archives, "MAX_BYTES", 300)
    with pytest.raises(ArchiveError, match="too large"):
        unpack(path, ("tests/",), tmp_path / "a")
    monkeypatch.setattr(archives, "MAX_BYTES", 1000)
    monkeypatch.setattr(archives, "MAX_FILES", 4)
    with pytest.raises(ArchiveError, match="more than 4"):
        unpack(path, ("tests/",), tmp_path / "b")


def test_no_archive_and_one_without_tests_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="has none of"):
        unpack(archive(tmp_path, {"t-1/a": b""}), ("tests/",), tmp_path / "a")
    broken = tmp_path / "t-2.tar.gz"
    broken.write_bytes((tmp_path / "t-1.tar.gz").read_bytes()[:40])
    with pytest.raises(ArchiveError, match="no archive"):
        unpack(broken, ("tests/",), tmp_path / "b")


def test_an_archive_with_another_checksum_is_removed(tmp_path: Path) -> None:
    path = archive(tmp_path, {"t-1/tests/a.py": b"a"})
    with pytest.raises(ArchiveError, match="SHA-256"):
        check(path, "0" * 64)
    assert not path.exists()


def test_tests_are_unpacked_once_and_again_when_the_suite_changes(tmp_path: Path) -> None:
    path = archive(tmp_path, {"t-1/tests/a.py": b"a", "t-1/more/b.py": b"b"})
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    url = f"https://x.invalid/{path.name}"  # the file exists, so nothing is downloaded
    suite = Suite("t", "T", url, digest, ("tests/",), ".", ("tests/*.py",), (), ())
    place = unpacked(suite, tmp_path)
    (place / "tests/a.py").write_text("kept")
    assert (unpacked(suite, tmp_path) / "tests/a.py").read_text() == "kept"
    other = unpacked(suite._replace(members=("tests/", "more/")), tmp_path)
    assert (other / "tests/a.py").read_text() == "a" and (other / "more/b.py").exists()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Yields a server's URL, and the folder that it serves."""
    folder = tmp_path / "site"
    folder.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


def test_an_archive_is_fetched_whole_or_not_at_all(
    site: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, folder = site
    path = archive(folder, {"t-1/tests/a.py": b"a"})
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    suite = Suite("t", "T", f"{url}/t-1.tar.gz", digest, ("tests/",), ".", ("*.py",), (), ())
    monkeypatch.setattr(archives, "MAX_ARCHIVE_BYTES", 10)
    with pytest.raises(ArchiveError, match="more than 10 bytes"):
        unpacked(suite, tmp_path)
    monkeypatch.undo()
    with pytest.raises(ArchiveError, match="cannot fetch"):
        unpacked(suite._replace(url=f"{url}/other.tar.gz"), tmp_path)
    assert (unpacked(suite, tmp_path) / "tests/a.py").read_text() == "a"


def test_a_run_of_some_files_replaces_their_rows() -> None:
    def suite(left_out: dict[str, str], **passed: int) -> dict[str, Any]:
        files = [{"file": f, "passed": n, "skipped": {}, "failed": {}} for f, n in passed.items()]
        return {"title": "T", "files": files, "left_out": left_out}

    known = [suite({"d": "why"}, a=1, b=2, c=3)]
    [found] = merged(known, [suite({"c": "now not"}, b=5, d=4)])
    assert {f["file"]: f["passed"] for f in found["files"]} == {"a": 1, "b": 5, "d": 4}
    assert found["left_out"] == {"c": "now not"}
    rows = table(found).splitlines()
    assert "| b | 5 | 5 | 0 | 0 |" in rows and "| all 3 files | 10 | 10 | 0 | 0 |" in rows
    assert "| now not | 0 | 1 |" in rows


def test_flags_become_those_of_moonpool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(translated.MAX_LEN, "2048")
    flags = ["Q/m", "--dtype", "bfloat16", "--max-model-len", "8192", "--enforce-eager"]
    flags += ["--lora-modules", "a=/x", "b=/y", "--port", "1"]
    ours = ["--max-model-len", "2048", "--lora-modules", "a=/x", "--lora-modules", "b=/y"]
    assert translated.vllm(flags) == [*ours, "--port", "1", "--served-model-name", "Q/m"]
    llama = ["--ctx-size", "512", "--no-jinja", "--reasoning-format", "none"]
    assert translated.llama(llama) == ["--max-model-len", "512", "--reasoning-parser", "none"]


def test_a_flag_that_moonpool_lacks_is_named() -> None:
    with pytest.raises(FlagError, match="no flag for --root-path"):
        translated.vllm(["m", "--root-path", "/x"])
    with pytest.raises(FlagError, match="no flag for --slots"):
        translated.llama(["--slots"])


def test_endings_are_counted_by_reason() -> None:
    text = HEAD + '[[skip]]\nreason = "why"\ntests = ["x.py::test_a*"]\n'
    endings = {
        "x.py::test_a": {"ending": "skipped", "remark": "why"},
        "x.py::test_b": {"ending": "skipped", "remark": "no GPU"},
        "x.py::test_c": {"ending": "passed"},
        "x.py::test_d": {"ending": "failed", "remark": "1 == 2"},
        "x.py::test_e": {"ending": "not run"},
    }
    found = read_results(parse("t", text), "x.py", endings)
    assert found.passed == 1
    assert found.skipped == {"why": 1, f"{OWN}: no GPU": 1}
    assert set(found.failed) == {"x.py::test_d", "x.py::test_e"}
    # a file without tests counts as failed
    assert read_results(parse("t", text), "x.py", {}).failed
