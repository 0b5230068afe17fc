"""Tests downloads over real sockets: checked, resumed, refused, interrupted."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from moonpool.trace.download import PUBLIC_TRACES, PublicTrace, download
from moonpool.trace.row import TraceError

CONTENT = b"".join(b'{"timestamp": %d}\n' % number for number in range(20_000))
SUM = hashlib.sha256(CONTENT).hexdigest()


class FileServer(ThreadingHTTPServer):
    """Serves CONTENT; keeps the requested ranges."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str | None] = []
        self.can_resume = True
        self.break_off_at: int | None = None

    def trace(self, sha256: str | None = SUM, path: str = "/a.jsonl") -> PublicTrace:
        url = f"http://127.0.0.1:{self.server_port}{path}"
        return PublicTrace(file_name="a.jsonl", url=url, sha256=sha256, licence="none")


class Handler(BaseHTTPRequestHandler):
    server: FileServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/a.jsonl")
            self.end_headers()
            return
        if self.path != "/a.jsonl":
            self.send_error(404)
            return
        start = 0
        if asked and self.server.can_resume:
            start = int(re.findall(r"\d+", asked)[0])
            if start >= len(CONTENT):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        else:
            self.send_response(200)
        body = CONTENT[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.break_off_at])


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer() as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def nothing(done: int, total: int | None) -> None:
    pass


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_is_downloaded_checked_and_recognised(server: FileServer, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    folder = tmp_path / "new" / "folder"
    outcome = download(server.trace(), folder, lambda done, total: seen.append((done, total)))
    assert outcome == "checked"
    assert files(folder) == {"a.jsonl": CONTENT}
    assert seen[0] == (0, len(CONTENT)) and seen[-1] == (len(CONTENT), len(CONTENT))
    assert download(server.trace(), folder, nothing) == "there"
    assert len(server.ranges) == 1


def test_a_download_without_checksum_is_reported(server: FileServer, tmp_path: Path) -> None:
    assert download(server.trace(sha256=None), tmp_path, nothing) == "not checked"
    assert download(server.trace(sha256=None), tmp_path, nothing) == "there, not checked"


def test_redirects_are_followed(server: FileServer, tmp_path: Path) -> None:
    assert download(server.trace(path="/moved"), tmp_path, nothing) == "checked"


def test_an_interrupted_download_resumes(server: FileServer, tmp_path: Path) -> None:
    server.break_off_at = 100_000
    with pytest.raises(TraceError, match=r"was interrupted.*it resumes there") as caught:
        download(server.trace(), tmp_path, nothing)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a.jsonl").exists()
    had = len(files(tmp_path)["a.jsonl.part"])
    assert 0 < had <= 100_000
    server.break_off_at = None
    assert download(server.trace(), tmp_path, nothing) == "checked"
    assert server.ranges == [None, f"bytes={had}-"]
    assert files(tmp_path) == {"a.jsonl": CONTENT}


@pytest.mark.parametrize("left", [b"something else", CONTENT + b"more"])
def test_a_part_of_another_version_is_downloaded_again(
    server: FileServer, tmp_path: Path, left: bytes
) -> None:
    (tmp_path / "a.jsonl.part").write_bytes(left)
    assert download(server.trace(), tmp_path, nothing) == "checked"
    assert files(tmp_path) == {"a.jsonl": CONTENT}


def test_a_server_that_cannot_resume_sends_all(server: FileServer, tmp_path: Path) -> None:
    server.can_resume = False
    (tmp_path / "a.jsonl.part").write_bytes(CONTENT[:5000])
    assert download(server.trace(), tmp_path, nothing) == "checked"


def test_wrong_bytes_are_not_kept(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"sha256 .* not the expected .*not kept"):
        download(server.trace(sha256="0" * 64), tmp_path, nothing)
    assert files(tmp_path) == {}


def test_a_wrong_file_that_is_there_is_left_alone(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"mine")
    with pytest.raises(TraceError, match="exists, but its sha256 is"):
        download(server.trace(), tmp_path, nothing)
    assert files(tmp_path) == {"a.jsonl": b"mine"}
    assert server.ranges == []


def test_no_such_page_and_no_network(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="answered 404"):
        download(server.trace(path="/none"), tmp_path, nothing)
    trace = server.trace()
    server.shutdown()
    server.server_close()
    with pytest.raises(TraceError, match=r"cannot reach 127.0.0.1.*check the network"):
        download(trace, tmp_path, nothing)
    assert files(tmp_path) == {}


def test_a_folder_that_cannot_be_made(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TraceError, match="cannot write"):
        download(server.trace(), tmp_path / "file", nothing)


def test_the_catalogue_is_sound() -> None:
    names = [trace.file_name for trace in PUBLIC_TRACES.values()]
    assert len(set(names)) == len(names) == 7
    for trace in PUBLIC_TRACES.values():
        assert trace.url.startswith("https://") and trace.url.endswith(trace.file_name)
        assert trace.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", trace.sha256)
