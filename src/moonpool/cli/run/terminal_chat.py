"""A chat in the terminal: reads messages, shows answers as they come, and keeps the history."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from moonpool.cli.run.background_server import BackgroundServer
from moonpool.cli.run.chat_stream import ChatError, ChatStream, Message

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
HELP = """\
  /system TEXT   set the system prompt and begin again; without TEXT, show it
  /clear         begin a new conversation
  /help          this list
  /bye           end (so does Ctrl-D)
  \"\"\"            begin and end a message of several lines; a line that ends with \\ goes on, too
  Ctrl-C         stop the answer"""
_DIM, _PLAIN, _ERASE = "\x1b[2m", "\x1b[0m", "\r\x1b[K"


class TerminalChat:
    """A conversation with one server. `parameters` are the fields of each request."""

    def __init__(self, server: BackgroundServer, parameters: dict[str, Any], system: str) -> None:
        self._server = server
        self._parameters = parameters
        self._system = system
        self._messages: list[Message] = []
        self._waits = False
        self._is_terminal = sys.stdout.isatty()

    def run(self) -> None:
        """Returns when the person ends the chat. Raises ServerEndedError."""
        # gives line editing and history where they are available
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        while True:
            try:
                message = self._read()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /bye ends the chat)")
                continue
            command, _, rest = message.strip().partition(" ")
            if command in ("/bye", "/exit", "/quit"):
                return
            if command.startswith("/") and "\n" not in message:
                self._obey(command, rest.strip())
            elif message.strip():
                self.say(message)

    def say(self, message: str) -> None:
        """Sends one message, and shows the answer. Raises ServerEndedError."""
        self._messages.append({"role": "user", "content": message})
        system = [{"role": "system", "content": self._system}] if self._system else []
        stream = ChatStream(self._server.port, self._show, self._show_wait)
        stopped = False
        try:
            stream.ask({**self._parameters, "messages": [*system, *self._messages]})
        except KeyboardInterrupt:
            stopped = True
        except ChatError as error:
            self._erase()
            self._server.check()
            print(f"\n{error}" if stream.text else str(error))
        self._erase()
        if stream.text:
            self._messages.append({"role": "assistant", "content": stream.text})
        else:
            self._messages.pop()  # the question was not answered
        print("\n" if not stopped else "\n(stopped)\n", end="")
        if not stopped and stream.usage:
            self._dim(stream.figures())

    def _read(self) -> str:
        line = input(PROMPT)
        if line.lstrip().startswith(QUOTES):
            lines = [line.lstrip()[len(QUOTES) :]]
            while QUOTES not in lines[-1]:
                lines.append(input(MORE))
            lines[-1] = lines[-1].partition(QUOTES)[0]
            return "\n".join(lines).strip("\n")
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(MORE))
        return "\n".join(lines)

    def _obey(self, command: str, rest: str) -> None:
        match command:
            case "/system" if rest:
                self._system, self._messages = rest, []
                self._dim("a new conversation, with this system prompt")
            case "/system":
                self._dim(self._system or "there is no system prompt")
            case "/clear":
                self._messages = []
                self._dim("a new conversation")
            case "/help" | "/?":
                print(HELP)
            case _:
                print(f"there is no command {command}; /help lists them")

    def _show(self, text: str) -> None:
        self._erase()
        sys.stdout.write(text)
        sys.stdout.flush()

    def _show_wait(self, what: str) -> None:
        if self._is_terminal and what:
            sys.stdout.write(f"{_ERASE}{_DIM}{what} ...{_PLAIN}")
            sys.stdout.flush()
            self._waits = True

    def _erase(self) -> None:
        if self._waits:
            sys.stdout.write(_ERASE)
            self._waits = False

    def _dim(self, text: str) -> None:
        print(f"{_DIM}{text}{_PLAIN}" if self._is_terminal else text)


def answer_once(
    server: BackgroundServer, parameters: dict[str, Any], system: str, prompt: str
) -> None:
    """Writes the answer to `prompt` on stdout as it comes. Raises ChatError, ServerEndedError."""

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    messages = [{"role": "system", "content": system}] if system else []
    stream = ChatStream(server.port, show, lambda what: None)
    try:
        stream.ask({**parameters, "messages": [*messages, {"role": "user", "content": prompt}]})
    except ChatError:
        server.check()  # raises the true reason of the failure, if the server has ended
        raise
    finally:
        if stream.text and not stream.text.endswith("\n"):
            show("\n")
