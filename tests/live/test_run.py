"""Tests `moonpool run`: one answer through a pipe, a chat in a terminal, and that its end leaves no
process behind."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool_lab.demo.local_server import free_port, is_alive

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

RUN = (sys.executable, "-m", "moonpool", "run")
MODEL = ("moonpool/induction", "--threads", "1")
LIMIT_S = 240.0


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "300"}


def once(
    environment: dict[str, str], *words: str, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    how = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [*RUN, *words], env=environment, capture_output=True, text=True, timeout=LIMIT_S, **how
    )


@pytest.mark.long
def test_a_prompt_by_a_pipe_is_answered_once_and_kept_on_disk(
    environment: dict[str, str], tmp_path: Path
) -> None:
    words = (*MODEL, "--temperature", "0", "--max-tokens", "3", "--port", "0")
    done = once(environment, *words, stdin="one two three one")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "not ready after" not in line]
    assert len(done.stdout.strip()) > 0 and said == []
    kept = tmp_path / "cache" / "moonpool" / "run" / "moonpool-induction" / "mixed-0"
    assert (kept / "index").is_file()
    again = once(environment, *words, "--no-ssd", "one two", "three one")
    assert (again.returncode, again.stdout) == (0, done.stdout)


def test_what_cannot_start_is_one_line(environment: dict[str, str], tmp_path: Path) -> None:
    done = once(environment, str(tmp_path / "none.gguf"), "--prompt", "x", "--port", "0")
    assert (done.returncode, done.stdout) == (1, "")
    missing = r"moonpool: .*none\.gguf does not exist: give a GGUF file, .*\n"
    assert re.fullmatch(missing, done.stderr)
    done = once(environment, "none.gguf", stdin="")
    assert re.fullmatch(missing, done.stderr), "before the prompt, which is missing too"
    done = once(environment, *MODEL, stdin=" \n")
    assert done.returncode == 1 and "the prompt on stdin is empty" in done.stderr
    done = once(environment, *MODEL, "one", "--prompt", "two")
    assert done.stderr == "moonpool: two prompts: give --prompt, or the prompt after the model\n"


@pytest.mark.long
def test_a_start_that_fails_says_so_once(environment: dict[str, str]) -> None:
    words = ("random:tiny", "--prompt", "x", "--port", "0")
    done = once(environment, *words)
    assert re.fullmatch(r"moonpool: .*'tiny' is neither a size .*\n", done.stderr)
    done = once(environment, *words, "--verbose")
    *log, last = done.stderr.splitlines()
    assert sum("'tiny' is neither a size" in line for line in log) == 1
    assert last == "moonpool: the server has ended: see its log above"


class Terminal:
    """Runs a command in a terminal of its own."""

    def __init__(self, line: tuple[str, ...], environment: dict[str, str]) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            # resets SIGINT, which background jobs of a shell ignore
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execve(line[0], line, environment)
        self._seen = ""

    def wait_for(self, text: str) -> str:
        """Returns the output up to `text`, and removes it from the buffer."""
        end_s = time.monotonic() + LIMIT_S
        while text not in self._seen:
            assert time.monotonic() < end_s, f"no {text!r} in {self._seen[-2000:]!r}"
            if select.select([self._fd], [], [], 0.5)[0]:
                self._seen += self._read()
        before, _, self._seen = self._seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def end(self) -> int:
        """Returns the exit status."""
        while self._read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self) -> str:
        try:
            return os.read(self._fd, 4096).decode(errors="replace")
        except OSError:  # fails if the other side has ended
            return ""


@pytest.fixture
def chat(environment: dict[str, str]) -> Iterator[tuple[Terminal, int]]:
    port = free_port()
    terminal = Terminal((*RUN, *MODEL, "--port", str(port), "--max-tokens", "4000"), environment)
    yield terminal, port
    try:
        os.kill(terminal.pid, signal.SIGKILL)
        os.waitpid(terminal.pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def server_of(terminal: Terminal) -> int:
    """Returns the process that the command has started."""
    children = Path(f"/proc/{terminal.pid}/task/{terminal.pid}/children").read_text()
    (server,) = map(int, children.split())
    assert b" serve " in Path(f"/proc/{server}/cmdline").read_bytes()
    return server


@pytest.mark.long
def test_a_chat_in_the_terminal(chat: tuple[Terminal, int]) -> None:
    terminal, port = chat
    places = terminal.wait_for(">>> ")
    assert f"ANTHROPIC_BASE_URL=http://127.0.0.1:{port} " in places
    assert f"http://127.0.0.1:{port}/v1, any key, model moonpool/induction" in places
    assert "moonpool pool clear" in places and "--no-ssd" in places
    terminal.type("/system Repeat.\r")
    terminal.wait_for("a new conversation, with this system prompt")
    terminal.wait_for(">>> ")
    terminal.type('"""first line\r')
    terminal.wait_for("... ")
    terminal.type('second line"""\r')
    terminal.wait_for("second line")
    terminal.wait_for("line")  # the built-in model repeats its prompt without end
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    terminal.wait_for(">>> ")
    terminal.type("/foo\r")
    terminal.wait_for("there is no command /foo; /help lists them")
    terminal.wait_for(">>> ")
    server = server_of(terminal)
    terminal.type("\x04")
    assert terminal.end() == 0
    assert not is_alive(server)


@pytest.mark.long
def test_the_server_ends_with_a_killed_chat(chat: tuple[Terminal, int]) -> None:
    terminal, _ = chat
    terminal.wait_for(">>> ")
    server = server_of(terminal)
    os.kill(terminal.pid, signal.SIGKILL)
    end_s = time.monotonic() + LIMIT_S
    while is_alive(server):
        assert time.monotonic() < end_s
        time.sleep(0.1)
