"""A model has malicious files: calls end with a one-line error, other calls and the head go on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.test_checkpoint import folder  # noqa: F401 (a fixture)
from tests.live.test_faults import run_command
from tests.live.test_vllm_front import OTHER_MODEL
from tests.live.vllm_stub import VllmStub, stubs
from tests.live.waiting import wait_until

pytestmark = pytest.mark.live

TEMPLATE = (
    "{% set what = messages[0]['content'] %}"
    "{% if what == 'loop' %}{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}"
    "{% endfor %}{% endif %}"
    "{% if what == 'fill' %}{{ ('a' * 10**10) | length }}{% endif %}"
    "{% if what == 'power' %}{{ 7**(10**9) }}{% endif %}"
    "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}"
    "{% if what == 'deep' %}{{ again(0) }}{% endif %}"
    "{% if what == 'never' %}{{ [0] * 10**10 }}{{ 'a' | center(10**10) }}{% endif %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
)


@pytest.fixture(scope="module")
def hostile(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    where = tmp_path_factory.mktemp("hostile")
    for path in folder.iterdir():
        (where / path.name).write_bytes(path.read_bytes())
    (where / "chat_template.jinja").write_text(TEMPLATE)
    return where


@pytest.fixture(scope="module")
def server(hostile: Path) -> Iterator[LocalServer]:
    arguments = [str(hostile), "--dtype", "float32", "--served-model-name", "hostile"]
    with LocalServer([*arguments, "--prefill", "1", "--decode", "1", "--kv-tokens", "4096"]) as up:
        yield up


def ask(server: LocalServer, content: str) -> httpx.Response:
    asked: dict[str, Any] = {"model": "hostile", "max_tokens": 4}
    asked["messages"] = [{"role": "user", "content": content}]
    return fresh.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60)


@pytest.mark.parametrize(
    "content",
    [
        "loop",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("fill", "power")),
        "deep",
        "never",
    ],
)
def test_a_template_without_end_costs_its_own_call(server: LocalServer, content: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(ask, server, content)
        time.sleep(0.3)  # gives this field time to be rendered first
        assert ask(server, "How many waves came in?").status_code == 200
        answer = call.result()
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "chat_template_error"
    assert "chat template" in error["message"]
    assert "\n" not in error["message"]
    cluster = fresh.get(f"{server.url}/cluster", timeout=60).json()
    assert cluster["head"]["restarts"] == 0


def check_refused(folder: Path, *words: str) -> None:  # noqa: F811
    done = run_command("serve", str(folder))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert all(word in last for word in words), last


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("config.json", {"num_hidden_layers": -1}, ("config.json", "num_hidden_layers", "-1")),
        ("tokenizer_config.json", {"chat_template": "{% for %}"}, ("chat template",)),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": 5}}, ("tokenizer.json",)),
    ],
)
def test_wrong_files_end_the_start_in_one_line(
    hostile: Path, tmp_path: Path, file: str, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    for path in hostile.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").unlink()
    whole = json.loads((tmp_path / file).read_text()) | changes
    (tmp_path / file).write_text(json.dumps(whole))
    check_refused(tmp_path, *words)


@pytest.mark.long
def test_a_vllm_server_with_such_a_model_is_turned_away_and_the_head_goes_on(
    hostile: Path, tmp_path: Path
) -> None:
    for path in hostile.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    whole["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA//8="}
    # This file ends the process that loads it.
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    good, other = VllmStub("m"), VllmStub("other", root=OTHER_MODEL)
    words = ["--admission", "none", "--slo-ttft", "600"]
    with (
        stubs(good, other),
        LocalServer(["--vllm", good.url, "--vllm", other.url, *words]) as server,
    ):
        other.stop()
        wait_until(lambda: len(server.instances()) == 1)
        other.names, other.root = ("evil",), str(tmp_path)
        other.start()
        told = "cannot be read here: the model's tokenizer or chat template ends the process"
        wait_until(lambda: any(told in line for line in server.log_lines()))
        asked = {"model": "m", "prompt": "Hi", "max_tokens": 2}
        answer = fresh.post(f"{server.url}/v1/completions", json=asked, timeout=60)
        assert answer.status_code == 200, answer.text
        cluster = fresh.get(f"{server.url}/cluster", timeout=60).json()
        assert cluster["head"]["restarts"] == 0
        assert [one["name"] for one in cluster["models"]] == ["m", "other"]
        assert not any("Traceback" in line for line in server.log_lines())
