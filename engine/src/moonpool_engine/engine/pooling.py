"""How a checkpoint for sentence-transformers makes embeddings."""

from __future__ import annotations

import logging
from pathlib import Path

from moonpool.text.fields import Fields
from moonpool.text.model_error import ModelError
from moonpool.text.model_folder import file_in, read_json, read_value
from moonpool.text.shown import listed, shown_name
from moonpool.types import Pooling

log = logging.getLogger(__name__)
MODULES_FILE = "modules.json"
_KNOWN_MODULES = {"Transformer", "Pooling", "Normalize"}


def stored_pooling(folder: Path) -> Pooling:
    """Returns the pooling that a checkpoint states: "last" if it is not for sentence-transformers,
    and "none" if this engine does not compute it.

    Raises `ModelError` for damaged files.
    """
    modules = _modules(folder)
    if not modules:
        return "last"
    folders = [part for kind, part in modules if kind == "Pooling"]
    modes: list[str] = []
    if folders:
        name = f"{folders[0]}/config.json" if folders[0] else "config.json"
        try:
            settings = read_json(file_in(folder, name))
        except FileNotFoundError:
            raise ModelError(
                f"{folder} has no {shown_name(name)}, named in {MODULES_FILE}"
            ) from None
        fields = Fields(settings, str(folder / name))
        modes = sorted(n for n in fields.names if n[:13] == "pooling_mode_" and fields.flag(n))
    others = {kind for kind, _ in modules} - _KNOWN_MODULES
    if others or modes not in (["pooling_mode_mean_tokens"], ["pooling_mode_lasttoken"]):
        ways = listed([*sorted(others), *modes]) or "no pooling"
        log.warning("%s: embeddings by %s are not computed here", folder, ways)
        return "none"
    return "mean" if modes == ["pooling_mode_mean_tokens"] else "last"


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module; none if the checkpoint is not for sentence-transformers."""
    path = file_in(folder, MODULES_FILE)
    try:
        modules = read_value(path)
    except FileNotFoundError:
        return []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path} holds no list of objects")
    each = [Fields(module, str(path), f"[{i}].") for i, module in enumerate(modules)]
    return [(fields.text("type").rpartition(".")[2], fields.text("path")) for fields in each]
