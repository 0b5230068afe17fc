"""The folder of a model: its place, and the content of its small files. The module needs no
torch."""

from __future__ import annotations

import json
import logging
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moonpool.text.fields import Fields
from moonpool.text.model_error import ModelError
from moonpool.text.shown import shown, shown_name
from moonpool.types import SAMPLING_RANGES

GGUF_SUFFIX = ".gguf"
WORD_PATTERNS = ["*.json", "*.jinja", "tokenizer*", "vocab*", "merges*"]
MAX_TEXT_BYTES = 64 << 20
"""Largest file of words that is read. Tokenizers may be larger."""
MAX_TOKENS = "max_new_tokens"
RANGES = SAMPLING_RANGES | {MAX_TOKENS: (1, 2**31 - 1)}
WHOLE = ("top_k", MAX_TOKENS)
log = logging.getLogger(__name__)


def find_folder(name: str, patterns: Sequence[str]) -> Path:
    """A local folder, or the files of Hub id `name` that match. Raises `ModelError`."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{name} is a file: give the folder that holds config.json")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise ModelError(f"model folder {name} does not exist")
    return _download(name, patterns)


def _download(name: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelError(
            f"model {name!r} is no local folder and cannot be loaded from the Hugging Face Hub "
            f"({reason}); give a folder, or download it first on a machine with network access"
        ) from error


def file_in(folder: Path, name: str) -> Path:
    """The path of a file of the model. Raises `ModelError` for a name, or a link, that leads out of
    the folder. A Hugging Face cache has its files in `blobs`, and links to them."""
    path = folder / name
    try:
        own, target = folder.resolve(), path.resolve()
        path.is_file()
    # raised for a loop of links, or for a name that no file can have
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{folder} has no file {shown_name(name)}: {reason}") from None
    blobs = own.parent.parent / "blobs"
    in_cache = own.parent.name == "snapshots" and target.is_relative_to(blobs)
    if not target.is_relative_to(own) and not in_cache:
        raise ModelError(
            f"{folder}: the file {shown_name(name)} lies outside, at {shown_name(str(target))}; a"
            " model's files must be in its own folder"
        )
    return path


def read_text(path: Path, most_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a file of words. Raises `ModelError`, and FileNotFoundError."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path} is no file")
        if status.st_size > most_bytes:
            raise ModelError(f"{path} has {status.st_size} bytes, more than {most_bytes}")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def read_value(path: Path) -> Any:
    """The value in a JSON file. Raises `ModelError`, and FileNotFoundError."""
    text = read_text(path)
    try:
        value = json.loads(text)
        if "\\ud" in text or "\\uD" in text:  # half a character could not be written or logged
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from None
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ModelError`, and FileNotFoundError."""
    value = read_value(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file of a model; empty if there is no such file. Raises `ModelError`."""
    try:
        return read_json(file_in(folder, name))
    except FileNotFoundError:
        return {}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with the further end tokens of generation_config.json (chat models)."""
    try:
        config = read_json(file_in(folder, "config.json"))
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json: not a checkpoint folder") from None
    ends = listed_ends(folder)
    if ends:
        own = Fields(config, str(folder / "config.json")).token_ids("eos_token_id")
        config["eos_token_id"] = list(dict.fromkeys((*ends, *own)))
    return config


def listed_ends(folder: Path) -> tuple[int, ...]:
    """The end tokens of generation_config.json. Raises `ModelError`."""
    settings = read_object(folder, "generation_config.json")
    return Fields(settings, str(folder / "generation_config.json")).token_ids("eos_token_id")


def sampling_defaults(folder: Path) -> dict[str, float]:
    """The model's own sampling defaults, read from generation_config.json as vLLM does.

    `max_new_tokens` becomes `max_tokens`. Values that are not numbers in their range are left out
    with a warning.
    """
    found: dict[str, float] = {}
    for name, value in read_object(folder, "generation_config.json").items():
        if name not in RANGES or value is None:
            continue
        least, most = RANGES[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and least <= value <= most and (name not in WHOLE or value == int(value)):
            found["max_tokens" if name == MAX_TOKENS else name] = value
        else:
            log.warning("generation_config.json: %s %s is left out", name, shown(value))
    return found
