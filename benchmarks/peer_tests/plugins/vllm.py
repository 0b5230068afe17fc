"""Replaces the parts of vLLM that its tests import, and starts moonpool where they start vLLM."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
from openai.types import CreateEmbeddingResponse

LAUNCH = "PEER_TESTS_LAUNCH"
"""Environment variable with the program that stands for `vllm serve`."""
MODEL = "PEER_TESTS_MODEL"
ADAPTER = "PEER_TESTS_ADAPTER"
START_S = 240.0


class NotHereError(RuntimeError):
    """The test runs code of vLLM in its own process."""


class _Kind(type):
    """A placeholder for any class of vLLM: tests may name it, but not use it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(f"{cls.__name__}.{name}")

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotHereError(f"{cls.__name__} is vLLM's own code")

    def __iter__(cls) -> NoReturn:
        raise NotHereError(f"{cls.__name__} is vLLM's own code")


def stand_in(name: str) -> Any:
    return _Kind(name, (), {})


class _Module(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a package, for the import system

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds each module of the packages that are not installed here."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for name, value in _REAL.get(module.__name__, {}).items():
            setattr(module, name, value)


class _Platform:
    """Every question about an accelerator is answered with no."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *_: False


class _Hub:
    def snapshot_download(self, *_: Any, **__: Any) -> str:
        """Returns our adapter, as all repositories that tests fetch are adapters, except models."""
        return os.environ[ADAPTER]


class _Environment:
    def __getattr__(self, name: str) -> None:
        return None


def _tokenizer(*_: Any, **__: Any) -> Any:
    """Returns the tokenizer of the served model, whichever model the test names."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(os.environ[MODEL])


class RemoteOpenAIServer:
    """Has the interface of vLLM's class of the same name, with moonpool behind it."""

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
        override_hf_configs: dict[str, Any] | None = None,
    ) -> None:
        if override_hf_configs:
            raise RuntimeError("moonpool serve has no flag for --hf-overrides")
        self.host = "127.0.0.1"
        self.port = _free_port() if auto_port else int(_value(vllm_serve_args, "--port"))
        line = [os.environ[LAUNCH], model, *vllm_serve_args]
        line += ["--port", str(self.port)] if auto_port else []
        self.uds = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the server
        self.proc = subprocess.Popen(
            line, env=os.environ | (env_dict or {}), stdout=self._log, stderr=self._log
        )
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while self.proc.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(self.url_for("health"), timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.1)
        self._log.seek(0)
        said = self._log.read().strip().splitlines() or [f"status {self.proc.poll()}"]
        raise RuntimeError(f"the server did not start: {said[-1]}")

    def _stop(self) -> None:
        self.proc.terminate()
        try:
            self.proc.wait(60)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()
        self._log.seek(0)
        sys.stdout.write(self._log.read())  # pytest shows the log beside a failure

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> Any:
        return self._client("openai", "OpenAI", self.url_for("v1"), options)

    def get_async_client(self, **options: Any) -> Any:
        return self._client("openai", "AsyncOpenAI", self.url_for("v1"), options)

    def get_client_anthropic(self, **options: Any) -> Any:
        return self._client("anthropic", "Anthropic", self.url_root, options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        return self._client("anthropic", "AsyncAnthropic", self.url_root, options)

    def _client(self, package: str, name: str, url: str, options: dict[str, Any]) -> Any:
        given = {"timeout": 600, "api_key": self.DUMMY_API_KEY, "max_retries": 0} | options
        return getattr(importlib.import_module(package), name)(base_url=url, **given)


def _value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _unchanged(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda test: test


class _LongInteger:
    """`torch.iinfo(torch.long)`, the limits of a seed."""

    min, max = -(2**63), 2**63 - 1


class _Version:
    __version__ = os.environ.get("PEER_TESTS_VERSION", "")

    @staticmethod
    def _prev_minor_version() -> str:
        return "before"


_REAL: dict[str, dict[str, Any]] = {
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.tokenizers": {"get_tokenizer": _tokenizer},
    "vllm.transformers_utils.repo_utils": {"hf_api": _Hub},
    "vllm": {"envs": _Environment(), "version": _Version},
    "vllm.utils.network_utils": {"get_open_port": _free_port},
    "vllm.version": {"__version__": _Version.__version__},
    "torch": {"long": int, "iinfo": lambda _: _LongInteger},
    "vllm.entrypoints.pooling.embed.protocol": {"EmbeddingResponse": CreateEmbeddingResponse},
    "vllm._aiter_ops": {"is_aiter_found_and_supported": lambda: False},
}


@pytest.fixture(scope="session")
def local_asset_server() -> None:
    """Tests of texts name it, too, and use nothing of it."""


def _install() -> None:
    wanted = ("vllm", "torch", "cloudpickle")
    absent = [name for name in wanted if importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, _Finder(absent))
    sys.modules["vllm.envs"] = _Environment()  # type: ignore[assignment]
    utils = _Module("tests.utils")
    utils.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]
    utils.VLLM_PATH = Path.cwd()  # type: ignore[attr-defined]
    utils.ROCM_EXTRA_ARGS = []  # type: ignore[attr-defined]
    utils.ROCM_ENV_OVERRIDES = {}  # type: ignore[attr-defined]
    utils.multi_gpu_only = utils.large_gpu_test = _unchanged  # type: ignore[attr-defined]
    sys.modules["tests.utils"] = utils
    sys.modules["tests.conftest"] = _Module("tests.conftest")
    sys.modules["tests.ci_envs"] = _Module("tests.ci_envs")
    sys.modules["tests.models.registry"] = _Module("tests.models.registry")
    import transformers

    transformers.AutoTokenizer.from_pretrained = _tokenizer


_install()
