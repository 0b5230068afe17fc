"""Tests parts of `moonpool run`: the messages while the server starts, and the chat's
temperature."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from moonpool.cli.run.chat_stream import (
    USUAL_TEMPERATURE,
    ChatError,
    ChatStream,
    with_temperature,
)
from moonpool.cli.run.start_display import COUNT_FROM_S, QUIET_S, StartDisplay
from tests.http_server import QuietHandler, serving

INSTANT = "2026-01-31T12:00:00.000Z"
PLAIN = "bfloat16 runs on plain torch, slowly: the kernels are not built; with a C++ compiler, ..."


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_warnings_of_the_start_stay_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    display = StartDisplay(verbose=False, clock=Clock())
    display.take(f"{INSTANT} head INFO loading")
    for process in ("mixed-0", "mixed-1"):
        display.take(f"{INSTANT} {process} WARNING {PLAIN}")
        display.look()
    display.end()
    display.take(f"{INSTANT} mixed-0 WARNING of an answer")
    display.end()
    assert capsys.readouterr().err == f"moonpool: {PLAIN}\n"


def test_a_long_start_says_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    display = StartDisplay(verbose=False, clock=clock)
    said = []
    for clock.now_s in (1.0, QUIET_S, QUIET_S + 1, 2 * QUIET_S):
        display.take(f"{INSTANT} mixed-0 INFO measuring step times")
        display.look()
        said.append(capsys.readouterr().err)
    line = "moonpool: not ready after {} s: measuring step times\n"
    assert said == ["", line.format(30), "", line.format(60)]


def test_a_terminal_shows_one_line_and_how_long_it_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    clock = Clock()
    display = StartDisplay(verbose=False, clock=clock)
    for clock.now_s in (0.0, 0.1, COUNT_FROM_S, COUNT_FROM_S + 0.1):
        display.take(f"{INSTANT} mixed-0 INFO loading weights")
        display.look()
    display.take(f"{INSTANT} mixed-0 WARNING {PLAIN}")
    display.end()
    erase = "\r\x1b[K"
    drawn = f"{erase}loading weights{erase}loading weights (2 s)"
    assert capsys.readouterr().err == f"{drawn}{erase}moonpool: {PLAIN}\n"


def test_the_whole_log_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    display = StartDisplay(verbose=True, clock=clock)
    display.take(f"{INSTANT} mixed-0 WARNING {PLAIN}")
    clock.now_s = 2 * QUIET_S
    display.look()
    display.end()
    display.take(f"{INSTANT} mixed-0 INFO later")
    warned = f"{INSTANT} mixed-0 WARNING {PLAIN}\n"
    assert capsys.readouterr().err == f"{warned}{INSTANT} mixed-0 INFO later\n"


@pytest.fixture
def models() -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the port of a server with one model, and the model's own settings."""
    own: dict[str, Any] = {}

    class OneModel(QuietHandler):
        def do_GET(self) -> None:
            listed = {"data": [{"id": "m", "default_sampling_params": own}]}
            self.answer(json.dumps(listed).encode())

    with serving(OneModel) as place:
        yield int(place.rpartition(":")[2]), own


def test_the_chat_takes_the_usual_temperature_where_none_is_stated(
    models: tuple[int, dict[str, Any]],
) -> None:
    port, own = models
    usual = {"max_tokens": 3, "temperature": USUAL_TEMPERATURE}
    assert with_temperature({"max_tokens": 3}, port) == usual
    assert with_temperature({"temperature": 0.0}, port) == {"temperature": 0.0}
    own["temperature"] = 0.6
    assert with_temperature({}, port) == {}


def test_a_server_that_is_gone_is_one_line() -> None:
    with pytest.raises(ChatError, match="the server did not name its model"):
        with_temperature({}, 9)


@pytest.mark.parametrize(("seconds", "speed"), [(141.0, "0.3/s"), (2.0, "39/s")])
def test_a_slow_answer_has_a_speed(seconds: float, speed: str) -> None:
    stream = ChatStream(0, print, print)
    stream.usage = {"prompt_tokens": 36, "completion_tokens": 40}
    stream.ttft_s, stream.seconds = 1.0, seconds
    said = f"40 tokens, {speed}; first one after 1.00 s; 0 of 36 prompt tokens were cached"
    assert stream.figures() == said
