"""The embedding of a prompt: its final hidden states become one vector of length 1.

A sum over the tokens of a prompt is carried from chunk to chunk. It adds one token after the other
in float64, so that its bits do not depend on the chunks.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moonpool.scheduler.actions import StepEntry
from moonpool.text.fields import Fields
from moonpool.text.model_error import ModelError
from moonpool.text.model_folder import file_in, read_json, read_value
from moonpool.text.shown import listed, shown_name
from moonpool.types import Pooling, Token

log = logging.getLogger(__name__)
MODULES_FILE = "modules.json"
_KNOWN_MODULES = {"Transformer", "Pooling", "Normalize"}


def stored_pooling(folder: Path) -> Pooling:
    """How a checkpoint for sentence-transformers makes embeddings; other checkpoints: "last".

    "none" if this engine does not compute its way. Raises `ModelError` for damaged files.
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


def pooled_rows(entry: StepEntry) -> int:
    """How many of the entry's last rows its embedding needs."""
    if entry.pooling == "mean":
        return len(entry.new_token_ids)
    return 1 if entry.pooling == "last" else 0


def pool(entry: StepEntry, states: Tensor) -> bytes | Token:
    """Returns the sum that the next step of the entry continues, or the finished embedding.

    states: [pooled_rows(entry), hidden], any dtype. Raises `ArithmeticError` for states that are
    not finite.
    """
    rows = states.detach().cpu().double().numpy()
    total = np.frombuffer(entry.pooled, dtype="<f8") if entry.start and entry.pooled else None
    if total is None:
        total = np.zeros(rows.shape[1])
    for row in rows:
        total = total + row
    if entry.draw is None:
        return total.astype("<f8").tobytes()
    return _embedding(total)


def pool_last(state: Tensor) -> Token:
    """The embedding that the last token's state [hidden] is. Raises as `pool`."""
    return _embedding(state.detach().cpu().double().numpy())


def _embedding(total: NDArray[np.float64]) -> Token:
    if not np.isfinite(total).all():
        raise ArithmeticError("the hidden states of a prompt contain NaN or infinity")
    # The length does not depend on the number of tokens, so the sum serves for the mean.
    unit = total / max(float(np.sqrt(np.square(total).sum())), 1e-300)
    return Token(0, payload=unit.astype("<f4").tobytes())
