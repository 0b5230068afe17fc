"""The folder of a model: where it is, and what its small files say. Needs no torch."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moonpool.engine.spec import ModelError
from moonpool.types import SAMPLING_RANGES

WORD_PATTERNS = ["*.json", "*.jinja", "tokenizer*", "vocab*", "merges*"]
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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ModelError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}: not a checkpoint folder") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with the further end tokens of generation_config.json (chat models)."""
    config = read_json(folder / "config.json")
    if (folder / "generation_config.json").exists():
        eos = read_json(folder / "generation_config.json").get("eos_token_id")
        ends = [*as_list(eos), *as_list(config.get("eos_token_id"))]
        config["eos_token_id"] = list(dict.fromkeys(ends))
    return config


def sampling_defaults(folder: Path) -> dict[str, float]:
    """The model's own sampling defaults, read from generation_config.json as vLLM does.

    `max_new_tokens` becomes `max_tokens`. Values that are not numbers in their range are left out
    with a warning.
    """
    if not (folder / "generation_config.json").exists():
        return {}
    found: dict[str, float] = {}
    for name, value in read_json(folder / "generation_config.json").items():
        if name not in RANGES or value is None:
            continue
        least, most = RANGES[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and least <= value <= most and (name not in WHOLE or value == int(value)):
            found["max_tokens" if name == MAX_TOKENS else name] = value
        else:
            log.warning("generation_config.json: %s %r is left out", name, value)
    return found


def as_list(ids: object) -> list[object]:
    """A config's value that may be missing, one id or a list of ids, as a list."""
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]
