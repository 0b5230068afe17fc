"""Tests `serve owner/repo` and `serve owner/repo:FILE`: the files come from a server with the
routes of the Hugging Face Hub, and later from the cache."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.forked.commands import LocalServer
from tests.live.conftest import SMALL
from tests.live.family_checkpoints import write
from tests.unit.engine.gguf_files import tiny_llama

COMMIT = "5" * 40
SPLIT = ["--prefill", "1", "--decode", "1"]
BODY = {"prompt": [5, 6, 7, 8] * 5, "max_tokens": 20, "temperature": 0.8, "seed": 3}


class Hub(ThreadingHTTPServer):
    """Serves the folders below `root` as repositories, at one commit each."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        own = {"HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}", "HF_HUB_DISABLE_XET": "1"}
        return os.environ | own | {"HF_HOME": str(self.root / "cache"), "HF_HUB_ETAG_TIMEOUT": "2"}


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        self.server.asked.append(f"{self.command} {self.path}")

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        words = self.path.partition("?")[0].strip("/").split("/")
        if words[:2] == ["api", "models"]:
            folder = self.server.root / words[2] / words[3]
            files = sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []
            listed = {"id": "/".join(words[2:4]), "sha": COMMIT, "siblings": []}
            listed["siblings"] = [{"rfilename": name} for name in files]
            tree = [
                {"type": "file", "path": n, "oid": COMMIT, "size": (folder / n).stat().st_size}
                for n in files
            ]
            content = json.dumps(tree if "tree" in words else listed).encode()
            self._send(200 if files else 404, content, body, "application/json")
        elif len(words) >= 5 and words[2] == "resolve":
            path = self.server.root.joinpath(*words[:2], *words[4:])
            found = path.read_bytes() if path.is_file() else b""
            self._send(200 if path.is_file() else 404, found, body, "application/octet-stream")
        else:
            self._send(404, b"", body, "text/plain")

    def _send(self, status: int, content: bytes, body: bool, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if status == 200:
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
        else:
            there = (self.server.root / self.path.strip("/").split("/")[1]).is_dir()
            self.send_header("X-Error-Code", "EntryNotFound" if there else "RepoNotFound")
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "org" / "tiny"
    folder.mkdir(parents=True)
    tiny_llama({"": "Q4_K", "token_embd": "Q6_K"}, hidden=256, inter=256).write(
        folder / "tiny.Q4_K_M.gguf"
    )
    write("qwen3", folder)
    server = Hub(tmp_path)
    yield server
    server.shutdown()
    server.server_close()


def text_of(name: str, environment: dict[str, str]) -> str:
    flags = [name, "--dtype", "float32", *SMALL, *SPLIT]
    with LocalServer(flags, environment=environment) as up:
        answer = httpx.post(f"{up.url}/v1/completions", json=BODY, timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["org/tiny:tiny.Q4_K_M.gguf", "org/tiny"])
def test_a_model_is_downloaded_once_and_served(name: str, hub: Hub) -> None:
    local = hub.root / "org" / "tiny" / (name.partition(":")[2] or ".")
    expected = text_of(str(local), hub.environment)
    assert not hub.asked
    assert text_of(name, hub.environment) == expected
    loaded = [line for line in hub.asked if line.startswith("GET") and "resolve" in line]
    wanted = ".gguf" if ":" in name else ".safetensors"
    assert sum(wanted in line for line in loaded) == 1, loaded
    assert len(loaded) == len(set(loaded)) and (":" in name) == (len(loaded) == 1)
    hub.shutdown()
    hub.server_close()  # stops the hub, which later starts do not need
    assert text_of(name, hub.environment) == expected


@pytest.mark.long
@pytest.mark.parametrize("name", ["org/tiny:other.gguf", "org/none:tiny.gguf", "org/none"])
def test_what_the_hub_has_not_is_one_line(name: str, hub: Hub) -> None:
    line = [sys.executable, "-m", "moonpool", "serve", name, *SMALL, "--port", "0"]
    done = subprocess.run(line, env=hub.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "Hugging Face Hub" in last and name.partition(":")[2] in last
