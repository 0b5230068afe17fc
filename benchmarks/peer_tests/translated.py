"""Starts `moonpool serve` in place of another server, with that server's flags:
`python -m benchmarks.peer_tests.translated vllm|llama_cpp FLAGS...`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

MODEL = "PEER_TESTS_MODEL"
"""Environment variable with the folder of the model, whatever model the flags name."""
MAX_LEN = "PEER_TESTS_MAX_LEN"
"""Environment variable with the longest context, whatever the flags say."""
NAME = "PEER_TESTS_NAME"
"""Environment variable with the name of the model in llama.cpp's tests, if they send one."""

Flags = dict[str, str | None]
"""moonpool's flag for each flag with a value, or None if the flag does not matter here."""

_VLLM: Flags = {
    "--dtype": None,  # the model's own dtype
    "--gpu-memory-utilization": None,
    "--max-lora-rank": None,
    "--max-cpu-loras": None,
    "--seed": None,
    "--structured-outputs-config": None,
    "--structured-outputs-config.backend": None,
    "--structured-outputs-config.reasoning-parser": None,
    "--max-logprobs": None,
    "--attention-backend": None,
    "--runner": None,
    "--tokenizer": None,
    "--max-model-len": "--max-model-len",
    "--max-num-seqs": "--max-num-seqs",
    "--max-num-batched-tokens": "--max-num-batched-tokens",
    "--served-model-name": "--served-model-name",
    "--tool-call-parser": "--tool-call-parser",
    "--reasoning-parser": "--reasoning-parser",
    "--chat-template": "--chat-template",
    "--api-key": "--api-key",
    "--port": "--port",
    "--host": "--host",
}
_VLLM_SWITCHES = {
    "--enforce-eager": "",
    "--enable-auto-tool-choice": "",
    "--enable-prompt-tokens-details": "",
    "--enable-chunked-prefill": "",
    "--enable-lora": "",
    "--enable-server-load-tracking": "",
    "--enable-tokenizer-info-endpoint": "",
    "--enable-request-id-headers": "",
    "--enable-per-request-metrics": "",
    "--trust-remote-code": "",
    "--enable-prefix-caching": "--enable-prefix-caching",
    "--no-enable-prefix-caching": "--no-enable-prefix-caching",
}
_LLAMA: Flags = {
    "--temp": None,  # moonpool's requests name the temperature, or get 1
    "--seed": None,
    "--model": None,
    "--hf-repo": None,
    "--hf-file": None,
    "--n-gpu-layers": None,
    "--batch-size": None,
    "--ubatch-size": None,
    "--threads": None,
    "--pooling": None,
    "-fa": None,
    "--n-predict": None,
    "--parallel": "--max-num-seqs",
    "--ctx-size": "--max-model-len",
    "--alias": "--served-model-name",
    "--api-key": "--api-key",
    "--port": "--port",
    "--host": "--host",
    "--chat-template-file": "--chat-template",
}
_LLAMA_SWITCHES = {
    "--offline": "",
    "--cont-batching": "",
    "--embedding": "",
    "--metrics": "",
    "--no-slots": "",
    "--kv-unified": "",
    "--jinja": "",
    "--no-jinja": "",
    "--no-ui": "",
    "--verbose": "",
}


class FlagError(ValueError):
    """moonpool has no equivalent of a flag."""


def vllm(arguments: list[str]) -> list[str]:
    """Returns the flags of `moonpool serve` for those of `vllm serve MODEL`. Raises FlagError."""
    model, *rest = arguments
    found: list[str] = []
    while rest:
        flag = rest.pop(0)
        if flag == "--lora-modules":
            while rest and not rest[0].startswith("--"):
                found += [flag, _module(rest.pop(0))]
        else:
            found += _one(flag, rest, _VLLM, _VLLM_SWITCHES)
    if "--served-model-name" not in found:
        found += ["--served-model-name", model]
    return found


def _module(text: str) -> str:
    """An adapter as NAME=PATH; vLLM takes JSON, too."""
    if not text.startswith("{"):
        return text
    module = json.loads(text)
    return f"{module['name']}={module['path']}"


def llama(arguments: list[str]) -> list[str]:
    """Returns the flags of `moonpool serve` for those of `llama-server`. Raises FlagError."""
    rest = list(arguments)
    found: list[str] = []
    while rest:
        flag = rest.pop(0)
        if flag == "--reasoning-format":
            found += ["--reasoning-parser", {"none": "none"}.get(rest.pop(0), "auto")]
        else:
            found += _one(flag, rest, _LLAMA, _LLAMA_SWITCHES)
    name = os.environ.get(NAME)
    return [*found, "--served-model-name", name] if name else found


def _one(flag: str, rest: list[str], flags: Flags, switches: dict[str, str]) -> list[str]:
    """Translates a flag, and takes its value from `rest`."""
    flag, is_inline, inline = flag.partition("=")
    flag = flag.replace("_", "-")  # vLLM takes both spellings
    if flag in switches:
        return [switches[flag]] if switches[flag] else []
    if flag not in flags:
        raise FlagError(f"moonpool serve has no flag for {flag}")
    value = inline if is_inline else rest.pop(0)
    ours = flags[flag]
    if ours == "--max-model-len":
        value = str(min(int(value), int(os.environ[MAX_LEN])))
    if ours == "--chat-template" and "{" in value:
        value = _template(value)
    elif os.path.exists(value):  # the server runs in another folder, so the path is made absolute
        value = os.path.abspath(value)
    return [] if ours is None else [ours, value]


def _template(text: str) -> str:
    """A file with the template; vLLM takes the template itself, too."""
    with tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False) as file:
        file.write(text)
    return file.name


def _by_name(name: str, folder: str) -> str:
    """Changes to a new folder in which the model has the name from the test, because `root` in
    `/v1/models` is the name as given. Returns the name."""
    place = Path(tempfile.mkdtemp(prefix="moonpool-peer-")) / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(folder)
    os.chdir(place.parents[len(Path(name).parts) - 1])
    return name


def command(peer: str, arguments: list[str]) -> list[str]:
    """Returns the whole command. Raises FlagError."""
    found = {"vllm": vllm, "llama_cpp": llama}[peer](arguments)
    if "--max-model-len" not in found:
        found += ["--max-model-len", os.environ[MAX_LEN]]
    model = os.environ[MODEL]
    if peer == "vllm" and not Path(arguments[0]).is_absolute():
        model = _by_name(arguments[0], model)
    line = [sys.executable, "-m", "moonpool", "serve", model, *found]
    return [*line, "--mixed", "1", "--prefill", "0", "--decode", "0", "--admission", "none"]


if __name__ == "__main__":
    try:
        line = command(sys.argv[1], sys.argv[2:])
    except FlagError as error:
        sys.exit(str(error))
    os.execv(line[0], line)
