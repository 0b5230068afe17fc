"""`moonpool top`: a running cluster in the terminal, from the frames of its live page."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import click
from rich.console import Console
from rich.live import Live

from moonpool.cli.output import fail, one_line
from moonpool.cli.server.address import Server, asks_server
from moonpool.cli.watch.cluster_events import Frame, NoFramesError, first_frame, frames
from moonpool.cli.watch.top_view import render

_RETRY_S = 2.0
_POLL_S = 0.2


@click.command()
@asks_server()
@click.option("--once", is_flag=True, help="Print one frame and end.")
def top(server: Server, once: bool) -> None:
    """Watch the cluster at URL: instances, stages, latencies, hits, refusals and requests.

    The view changes each second; q or Ctrl-C ends it. Without a terminal, one frame is printed.
    """
    with one_line(NoFramesError):
        frame = first_frame(server)
    console = Console()
    if once or not console.is_terminal:
        console.print(render(frame, server.url, "", console.width, None))
        return
    with _single_keys() as has_keys, _interrupt_noted() as interrupted:
        _watch(console, _Reader(server, frame), has_keys, interrupted)


class _Reader(threading.Thread):
    """Reads frames in a thread of its own, and connects again after a loss."""

    def __init__(self, server: Server, frame: Frame) -> None:
        super().__init__(daemon=True)
        self.url = server.url
        self._server = server
        self.newest: queue.Queue[tuple[Frame, str]] = queue.Queue(maxsize=8)
        self._last = frame
        self.ended_by: str | None = None
        """Why no further frame will come."""

    def run(self) -> None:
        while True:
            state = f"{self.url} ended the stream, trying again"
            try:
                for frame in frames(self._server):
                    self._last = frame
                    self.newest.put((frame, ""))
            except NoFramesError as error:
                state = str(error)
                if error.is_final:
                    self.ended_by = state
                    return
            self.newest.put((self._last, state))
            time.sleep(_RETRY_S)


def _watch(console: Console, reader: _Reader, has_keys: bool, interrupted: threading.Event) -> None:
    """Draws until q or Ctrl-C is pressed. Ends the command with one line if no further frame can
    come."""
    reader.start()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while reader.ended_by is None:
            if interrupted.is_set():
                return
            with contextlib.suppress(queue.Empty):
                frame, state = reader.newest.get(timeout=_POLL_S)
                height = console.height
                live.update(render(frame, reader.url, state, console.width, height), refresh=True)
            if has_keys and select.select([sys.stdin], [], [], 0)[0]:
                pressed = os.read(sys.stdin.fileno(), 16)
                if b"q" in pressed or b"Q" in pressed or not pressed:
                    return
    fail(reader.ended_by)


@contextlib.contextmanager
def _interrupt_noted() -> Iterator[threading.Event]:
    """Ctrl-C sets the event that is yielded. An exception in the middle of drawing could be lost in
    a library's clean-up code. A second Ctrl-C ends the process at once."""
    interrupted = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _single_keys() -> Iterator[bool]:
    """Lets keys arrive without Enter and without echo. Yields whether stdin is a terminal."""
    if not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield True
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
