"""Identifies the model that a vLLM serves: the hash of its weights and of all settings that change
its KVCache.

Files are hashed once; the user's cache folder keeps the hashes, by path, size, time and inode.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_OF_MEDIA = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method")
"""Settings that change what a model sees of an image, and not the image's hash."""
_OF_ADAPTERS = ("lora_dtype", "target_modules", "enable_tower_connector_lora")
_THREADS = 4
MAX_KEPT = 4096


class UnknownModelError(Exception):
    """The weights cannot be identified; one line says why."""


def hash_folder(folder: Path) -> str:
    """Returns the hash of a checkpoint or adapter: its weights and the settings files beside them.
    Raises UnknownModelError."""
    if folder.is_file():
        return _hash_files([folder])
    files = [path for path in sorted(folder.rglob("*")) if _counts(path)]
    if not any(path.suffix in _WEIGHTS for path in files):
        raise UnknownModelError(f"{folder} has no weights (*.safetensors, *.bin, *.pt, *.gguf)")
    return _hash_files(files, folder)


def model_folder(vllm_config: Any) -> Path:
    """Returns the local folder of the weights that vLLM has loaded. Raises UnknownModelError."""
    model = vllm_config.model_config
    load = vllm_config.load_config
    if str(getattr(load, "load_format", "auto")).endswith("dummy"):
        raise UnknownModelError("its weights are random (load format dummy)")
    name = str(getattr(model, "model_weights", "") or model.model)
    return local_folder(name, getattr(model, "revision", None), getattr(load, "download_dir", None))


def local_folder(name: str, revision: str | None = None, cache: str | None = None) -> Path:
    """Returns where the files of a path or a name of the Hub are on this machine, with the Hub's
    `cache` folder. Raises UnknownModelError."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
    except Exception as error:  # many kinds of errors mean that the files are not on this machine
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnknownModelError(f"the files of {name} are not on this machine ({text})") from None
    return Path(found)


def settings_of(vllm_config: Any, block_tokens: int, vllm_version: str) -> list[Any]:
    """Returns all that changes a block's content besides weights, tokens and layout."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    hf = model.hf_config.to_dict() if hasattr(model.hf_config, "to_dict") else {}
    hf = {key: value for key, value in hf.items() if key not in ("_name_or_path",)}
    stretched = _stretches(hf)
    media = getattr(model, "multimodal_config", None)
    return [
        "moonpool-vllm-1",
        vllm_version,
        str(model.dtype),
        str(getattr(model, "quantization", None)),
        repr(getattr(model, "quantization_config", None)),
        [repr(getattr(media, name, None)) for name in _OF_MEDIA],
        str(cache.cache_dtype),
        block_tokens,
        int(parallel.tensor_parallel_size),
        json.dumps(hf, sort_keys=True, default=str),
        int(model.max_model_len) if stretched else 0,
    ]


def adapter_settings_of(vllm_config: Any) -> str:
    """Returns the settings that change how vLLM applies an adapter."""
    lora = getattr(vllm_config, "lora_config", None)
    return repr([getattr(lora, name, None) for name in _OF_ADAPTERS])


def group_of(weights: str, settings: Sequence[Any], layout: str) -> bytes:
    """Returns the pool's name for all vLLMs whose blocks are interchangeable (32 bytes)."""
    text = json.dumps([weights, list(settings), layout])
    return hashlib.sha256(text.encode()).digest()


def _stretches(config: Any) -> bool:
    """Whether positions depend on the longest context: some ways to stretch rotary positions do."""
    text = json.dumps(config, default=str)
    return any(f'"{word}"' in text for word in ("longrope", "dynamic", "su"))


def _counts(path: Path) -> bool:
    if not path.is_file():
        return False
    name = path.name
    is_setting = path.suffix == ".json" and not name.startswith(("token", "vocab", "special"))
    return path.suffix in _WEIGHTS or is_setting


def _hash_files(files: Sequence[Path], folder: Path | None = None) -> str:
    known = _read_known()
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            hashes = list(pool.map(lambda path: _hash_file(path, known), files))
    except OSError as error:
        raise UnknownModelError(f"{error.filename}: {error.strerror}") from None
    _write_known(known)
    names = [str(path.relative_to(folder)) if folder else "weights" for path in files]
    return hashlib.sha256(json.dumps([names, hashes]).encode()).hexdigest()


def _hash_file(path: Path, known: dict[str, str]) -> str:
    status = path.stat()
    stamp = [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino]
    name = hashlib.sha256(json.dumps(stamp).encode()).hexdigest()
    if name not in known:
        with path.open("rb") as file:
            known[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return known[name]


def _known_path() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "moonpool" / "weights.json"


def _read_known() -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(_known_path().read_text())
        if isinstance(found, dict):
            return {str(key): str(value) for key, value in found.items()}
    return {}


def _write_known(known: dict[str, str]) -> None:
    """Keeps the newest hashes. A failure costs another hash the next time."""
    path = _known_path()
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        newest = dict(list(known.items())[-MAX_KEPT:])
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(newest, file)
        os.replace(file.name, path)
