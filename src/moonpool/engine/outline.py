"""What a head must know of a model: its words, where answers end, how far it reaches. Of a model
that somebody else's engines compute, nothing more is there: no weights are looked for, and any
architecture will do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from moonpool.engine.builtin import DEFAULT_MODEL, open_model
from moonpool.engine.checkpoint import (
    WORD_PATTERNS,
    as_list,
    find_folder,
    read_config,
    sampling_defaults,
)
from moonpool.engine.random_weights import PREFIX
from moonpool.engine.spec import ModelError

MAX_VOCAB = 1 << 24


@dataclass(frozen=True, slots=True)
class Outline:
    """`tokenizer` as in `LoadedModel`; `max_positions` 0: not known."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_positions: int
    tokenizer: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def outline_of(name: str, dtype: str) -> Outline:
    """Of a model that our engine computes. Raises `ModelError`."""
    model = open_model(name, dtype)
    spec = model.spec
    return Outline(
        spec.vocab_size,
        spec.eos_token_ids,
        spec.max_positions,
        model.tokenizer,
        model.sampling,
        tuple(spec.notes),
    )


def outline_without_weights(name: str, dtype: str) -> Outline:
    """From the files beside the weights alone. Raises `ModelError`."""
    if name == DEFAULT_MODEL or name.startswith(PREFIX):
        return outline_of(name, dtype)
    folder = find_folder(name, WORD_PATTERNS)
    config = read_config(folder)
    inner = config.get("text_config")  # of models that also see or hear
    words = config | inner if isinstance(inner, dict) else config
    vocab_size = words.get("vocab_size")
    if not _is_count(vocab_size) or not 0 < vocab_size <= MAX_VOCAB:
        raise ModelError(f"{folder / 'config.json'}: vocab_size {vocab_size!r} is no vocabulary's")
    ends = [*as_list(config.get("eos_token_id")), *as_list(words.get("eos_token_id"))]
    return Outline(
        vocab_size,
        tuple(end for end in dict.fromkeys(ends) if _is_count(end) and 0 <= end < vocab_size),
        0,  # who computes says it: scaled positions reach further than config.json's number
        str(folder),
        sampling_defaults(folder),
    )


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
