"""A `vllm serve` from another Python installation, as processes of its own.

Sets its command line and environment: prefix caching and chunked prefill are on, and it uses the
loopback address only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from moonpool_lab.demo.local_server import LocalServer, ServerError

START_S = 600.0
END_S = 60.0
KV_GIB = 2
CPU_BLOCK_TOKENS = 32
"""vLLM's attention on a CPU takes blocks of multiples of this number."""


def vllm_command(python: str) -> str:
    """Returns the command of that Python's installation. Raises ServerError."""
    command = Path(python).with_name("vllm")
    if not command.exists():
        raise ServerError(f"there is no {command}: --peer-python must be that of a vLLM")
    return str(command)


def vllm_environment(python: str) -> dict[str, str]:
    """Returns our environment without our Python's path."""
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    environment.pop("PYTHONPATH", None)
    return environment | {"PATH": f"{Path(python).parent}:{environment.get('PATH', '')}"}


def cpu_sizes(kv_tokens: int, context_tokens: int, step_tokens: int) -> dict[str, object]:
    """The options of a vLLM on a CPU with room for this many tokens."""
    return {
        "--block-size": CPU_BLOCK_TOKENS,
        "--max-model-len": context_tokens,
        "--max-num-batched-tokens": step_tokens,
        "--num-gpu-blocks-override": kv_tokens // CPU_BLOCK_TOKENS,
    }


class VllmServer(LocalServer):
    def __init__(
        self,
        python: str,
        folder: str,
        cores: str,
        options: Mapping[str, object],
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Serves a checkpoint's folder on cores such as "0-1". Raises ServerError."""
        super().__init__((), START_S)
        given = {"--port": self.port, "--host": "127.0.0.1", "--dtype": "bfloat16"} | dict(options)
        words = [str(word) for pair in given.items() for word in pair]
        words += ["--enable-prefix-caching", "--enable-chunked-prefill"]
        words += ["--enable-prompt-tokens-details", *flags]  # makes the server report its hits
        self._arguments = [vllm_command(python), "serve", folder, *words]
        self._environment = vllm_environment(python) | {
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "PYTHONHASHSEED": "0",  # names of blocks that several instances must share
            **(environment or {}),
        }

    def stop(self, sign: signal.Signals = signal.SIGTERM, wait_s: float = END_S) -> int:
        """Stops as `LocalServer.stop` does, with more time: vLLM ends the answers under way
        first."""
        return super().stop(sign, wait_s)

    def last_words(self, num_lines: int = 5) -> str:
        """Returns the first error: vLLM's last lines only say that something failed."""
        causes = [line for line in self.said("Error: ") if " WARNING " not in line]
        return causes[0] if causes else super().last_words(num_lines)

    def said(self, text: str) -> list[str]:
        """The lines of its log that contain `text`."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return [line.strip() for line in lines if text in line]
