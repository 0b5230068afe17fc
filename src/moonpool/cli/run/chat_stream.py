"""One answer of a chat, streamed over HTTP. This module imports little, so that `run` starts at
once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from typing import Any

from moonpool.cli.run.background_server import HOST
from moonpool.server_events import DONE, ServerEventReader

Message = dict[str, str]
USUAL_TEMPERATURE = 0.8
"""The temperature for a model that states none. The API takes 1, as OpenAI's does; small models
then ramble."""


class ChatError(RuntimeError):
    """The server refused or broke off; one line says why."""


class ChatStream:
    """One call of `/v1/chat/completions`. `ask` fills in the figures; times are in seconds."""

    def __init__(self, port: int, on_text: Callable[[str], None], on_wait: Callable[[str], None]):
        """`on_text` gets the parts of the answer as they arrive. Before that, `on_wait` gets the
        server's present work, such as "prefill of 4054 tokens, 1024 of them cached"."""
        self._port = port
        self._on_text = on_text
        self._on_wait = on_wait
        self.text = ""
        self.ttft_s: float | None = None
        self.seconds = 0.0
        self.usage: dict[str, Any] = {}
        self.finish_reason = ""

    def ask(self, body: dict[str, Any]) -> None:
        """Returns at the answer's end. An exception, such as KeyboardInterrupt, also ends the
        answer at the server. Raises ChatError."""
        began_s = time.monotonic()
        connection = HTTPConnection(HOST, self._port)
        try:
            sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(sent), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ChatError(_reason(response.read()))
            events = ServerEventReader(on_comment=lambda text: self._on_wait(text.decode()))
            for line in response:
                for event in events.feed(line):
                    self._take(event, began_s)
        except (OSError, HTTPException, ValueError) as error:
            raise ChatError(f"the answer broke off: {error or type(error).__name__}") from None
        finally:
            self.seconds = time.monotonic() - began_s
            connection.close()

    def figures(self) -> str:
        """Returns what the answer took, in words."""
        prompt = self.usage.get("prompt_tokens", 0)
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        tokens = self.usage.get("completion_tokens", 0)
        spent_s = self.seconds - (self.ttft_s or 0.0)
        rate = ""
        if tokens > 1 and spent_s > 0:
            speed = (tokens - 1) / spent_s
            rate = f", {speed:.0f}/s" if speed >= 10 else f", {speed:.1f}/s"
        return (
            f"{tokens} tokens{rate}; first one after {self.ttft_s or self.seconds:.2f} s;"
            f" {cached} of {prompt} prompt tokens were cached"
        )

    def _take(self, event: bytes, began_s: float) -> None:
        if event == DONE:
            return
        chunk = json.loads(event)
        if "error" in chunk:
            raise ChatError(_line_of(chunk["error"]))
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            delta = choice["delta"]
            text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if text:
                if self.ttft_s is None:
                    self.ttft_s = time.monotonic() - began_s
                self.text += delta.get("content") or ""
                self._on_text(text)


def with_temperature(parameters: dict[str, Any], port: int) -> dict[str, Any]:
    """The parameters, with a temperature if neither they nor the model's own settings have one.
    Raises ChatError."""
    if "temperature" in parameters:
        return parameters
    connection = HTTPConnection(HOST, port)
    try:
        connection.request("GET", "/v1/models")
        model = json.loads(connection.getresponse().read())["data"][0]
    except (OSError, HTTPException, ValueError, LookupError) as error:
        raise ChatError(f"the server did not name its model: {error!r}") from None
    finally:
        connection.close()
    if "temperature" in model["default_sampling_params"]:
        return parameters
    return {**parameters, "temperature": USUAL_TEMPERATURE}


def _reason(body: bytes) -> str:
    try:
        return _line_of(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200] or "no reason was given"


def _line_of(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
