"""vLLM's own router (the package vllm-router), from a Python installation of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from moonpool_lab.demo.local_server import LocalServer, ServerError, free_port


class RouterServer(LocalServer):
    """A router in front of the vLLMs at `urls`. `flags` choose its policy."""

    def __init__(self, python: str, urls: Sequence[str], flags: Sequence[str]) -> None:
        """Raises ServerError."""
        super().__init__(())
        command = Path(python).with_name("vllm-router")
        if not command.exists():
            raise ServerError(f"there is no {command}: --router-python must be that of vllm-router")
        self._arguments = [
            *[str(command), "--host", "127.0.0.1", "--port", str(self.port)],
            *["--prometheus-port", str(free_port()), "--log-level", "warning"],
            *["--worker-startup-check-interval", "1", "--worker-urls", *urls, *flags],
        ]
        self._environment = dict(os.environ)
        self._environment.pop("PYTHONPATH", None)

    @staticmethod
    def event_flags(model: str, places: Sequence[str], block_tokens: int) -> list[str]:
        """Returns flags that name the KV event addresses of the vLLMs. `places` are given as
        `serve --vllm` takes them."""
        flags = ["--kv-event-block-size", str(block_tokens), "--kv-event-model", model]
        for place in places:
            url, events, replay = place.split(",")
            flags += ["--kv-event-source", f"{url}={events}"]
            flags += ["--kv-event-replay-source", f"{url}={replay}"]
        return flags
