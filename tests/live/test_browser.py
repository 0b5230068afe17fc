"""Headless Chromium opens the pages: axe finds them accessible, they send no request to other
hosts, show no error, and do not scroll sideways.

axe and the driver of the browser come from npm when the test is set up.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.unit.website.built_site import write_sources

HERE = Path(__file__).parent / "browser"
TOOLS = ("chromium", "node", "npm")
ABSENT = [tool for tool in TOOLS if shutil.which(tool) is None]
BAD_PAGE = """<!DOCTYPE html><html><head><title>bad</title></head><body style="width: 3000px">
<img src="http://127.0.0.2:9/a.png"><p style="color: #eee; background: #fff">pale</p>
<svg width="99" height="20"><text x="3" y="9" text-anchor="end">cut off</text></svg>
<script>throw new Error("planted")</script></body></html>"""

pytestmark = [
    pytest.mark.live,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(ABSENT), reason=f"needs {', '.join(ABSENT)}"),
]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the script and its imports."""
    folder = tmp_path_factory.mktemp("browser")
    for name in ("look.mjs", "use.mjs", "package.json"):
        shutil.copy(HERE / name, folder)
    line = ["npm", "install", "--no-fund", "--no-audit"]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    long_name = "an-organisation-with-a-long-name/" + "a-model-with-a-long-name-" * 4
    with LocalServer(["moonpool/induction", "--served-model-name", long_name]) as server:
        for _ in range(4):
            body = {"prompt": "one two one two " * 20, "max_tokens": 8}
            fresh.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()
        yield server


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Runs a file server and yields its address."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def look(tools: Path, url: str, awaited: str) -> list[dict[str, Any]]:
    chromium = shutil.which("chromium") or ""
    line = ["node", str(tools / "look.mjs"), chromium, url, str(tools), awaited]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    assert {(v["scheme"], v["width"]) for v in found} == {
        (scheme, width) for scheme in ("light", "dark") for width in (1400, 390)
    }
    return found


@pytest.mark.parametrize(("path", "awaited"), [("/", ".card"), ("/docs", "#schemas details")])
def test_a_page_is_accessible_and_asks_nobody_else(
    tools: Path, server: LocalServer, path: str, awaited: str
) -> None:
    for view in look(tools, server.url + path, awaited):
        assert view["passes"] > 20
        assert not view["violations"], view
        assert not view["outside"] and not view["errors"], view
        assert view["wide"] <= 0 and not view["cut"], view


def test_the_documentation_is_accessible_and_asks_nobody_else(tools: Path, tmp_path: Path) -> None:
    done = write_sources(tmp_path)()
    assert done.returncode == 0, done.stderr
    with served(tmp_path / "site") as url:
        for page in ("index", "serving", "planning"):
            for view in look(tools, f"{url}/{page}.html", ".md-content"):
                assert view["passes"] > 20
                assert not view["violations"], (page, view)
                assert not view["outside"] and not view["errors"], (page, view)
                assert view["wide"] <= 0, (page, view)


def test_what_is_wrong_with_a_page_is_seen(tools: Path, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(BAD_PAGE)
    with served(tmp_path) as url:
        views = look(tools, f"{url}/", "p")
    for view in views:
        kinds = {each.partition(":")[0] for each in view["violations"]}
        assert {"image-alt", "color-contrast", "html-has-lang"} <= kinds
        assert view["outside"] == ["http://127.0.0.2:9/a.png"]
        assert any("planted" in error for error in view["errors"])
        assert view["wide"] > 0 and view["cut"] == ["cut off"]


def use(tools: Path, url: str, key: str, others_request: str) -> dict[str, Any]:
    """Opens the live page with this key and asks a question in its chat, as a visitor would."""
    chromium = shutil.which("chromium") or ""
    line = ["node", str(tools / "use.mjs"), chromium, url, key, "one two one two", others_request]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_page_asks_for_a_key_chats_and_explains(tools: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one one\nsk-two two\nsk-operator admin\n")
    with LocalServer(["moonpool/induction", "--api-key-file", str(keys)]) as server:
        body = {"prompt": "three four three", "max_tokens": 4}
        bearer = {"authorization": "Bearer sk-two"}
        path = f"{server.url}/v1/completions"
        other = fresh.post(path, json=body, headers=bearer, timeout=120)
        others_request = other.raise_for_status().headers["x-request-id"]
        tenant = use(tools, server.url, "sk-one", others_request)
        operator = use(tools, server.url, "sk-operator", others_request)
    for seen in (tenant, operator):
        assert not seen["errors"] and seen["beforeKey"] == ""
        assert seen["answer"] and seen["type"].startswith("text/event-stream")
        for source in ("DRAM", "fetched", "SSD", "computed"):
            assert source in seen["sources"]
        assert "TTFT" in seen["note"] and "prefill-0" in seen["note"]
        assert "predicted" in seen["why"] and "prefill" in seen["why"]
        assert seen["views"] == [True, False]
        assert seen["stopped"].startswith("Stopped.") or "TTFT" in seen["stopped"]
        assert {"h3", "strong", "code", "a", "li", "pre", "th", "td"} <= set(
            seen["markdown"]["tags"]
        )
        assert "i" not in seen["markdown"]["tags"] and "<i>j</i>" in seen["markdown"]["text"]
        assert seen["markdown"]["tags"].count("a") == 1, "no link but to the web"
    assert tenant["state"] == "serving, requests of one" and operator["state"] == "serving"
    assert not tenant["events"] and "joined prefill-0 as prefill" in operator["events"]
    assert not tenant["payers"]
    assert others_request not in tenant["rows"] and tenant["others"] == 404
    assert others_request in operator["rows"]
