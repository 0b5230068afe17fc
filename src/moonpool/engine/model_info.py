"""What the API needs of a model: vocabulary, end tokens, tokenizer. Needs no torch for a model that
external engines compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.engine.families.values import Fields
from moonpool.engine.gguf.files import GGUF_SUFFIX
from moonpool.engine.model_folder import (
    WORD_PATTERNS,
    find_folder,
    read_config,
    sampling_defaults,
)
from moonpool.engine.tokenizer import Tokenizer, TokenizerParts, Vocabulary
from moonpool.engine.tokenizers.byte import ByteTokenizer
from moonpool.engine.tokenizers.huggingface import HfTokenizer
from moonpool.types import Pooling

if TYPE_CHECKING:
    from moonpool.engine.lora.adapter import Adapter

BYTE_TOKENIZER = "bytes"
BUILT_IN = ("moonpool/induction", "random:")
"""How the names of models begin that have no files."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the API needs of a model: vocabulary, end tokens, context length, tokenizer.

    `tokenizer` is as in `LoadedModel`. `max_positions` 0 means unknown.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_positions: int
    tokenizer: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    hidden_size: int = 0
    pooling: Pooling = "none"  # of its embeddings; "none": this engine computes none
    adapters: tuple[Adapter, ...] = ()


def model_info_without_weights(name: str, dtype: str) -> ModelInfo:
    """The info of a model that external engines compute, read without its weights.

    Any architecture works. Raises `ModelError`.
    """
    if name.startswith(BUILT_IN):
        from moonpool.engine.builtin import model_info  # needs torch

        return model_info(name, dtype)
    folder = find_folder(name, WORD_PATTERNS)
    config = Fields(read_config(folder), str(folder / "config.json"))
    words = config.within("text_config").over(config)  # multimodal models
    vocab_size = words.positive("vocab_size")
    ends = (*config.token_ids("eos_token_id"), *words.token_ids("eos_token_id"))
    return ModelInfo(
        vocab_size,
        tuple(end for end in dict.fromkeys(ends) if end < vocab_size),
        0,  # the external engine reports it: RoPE scaling extends the number in config.json
        str(folder),
        sampling_defaults(folder),
    )


def open_tokenizer(source: str, vocab_size: int, parts: TokenizerParts | None = None) -> Tokenizer:
    """Opens the tokenizer named by `LoadedModel.tokenizer`. `parts`: what `tokenizer_parts` gave.
    Raises `TokenizerError`."""
    if source == BYTE_TOKENIZER:
        return ByteTokenizer(vocab_size)
    return HfTokenizer(parts or tokenizer_parts(source) or Path(source))


def tokenizer_parts(source: str) -> TokenizerParts | None:
    """What a GGUF file says of its tokenizer; None if that is read from a folder. Raises
    `TokenizerError`."""
    path = Path(source)
    if path.suffix != GGUF_SUFFIX:
        return None
    from moonpool.engine.gguf.tokenizer import gguf_parts  # needs torch

    return gguf_parts(path)


def open_vocabulary(source: str, vocab_size: int) -> Vocabulary:
    """The tokens of that tokenizer, sooner where its file lists them. Raises `TokenizerError`."""
    path = Path(source)
    if path.suffix != GGUF_SUFFIX:
        return open_tokenizer(source, vocab_size)
    from moonpool.engine.gguf.tokenizer import GgufVocabulary  # needs torch

    return GgufVocabulary(path)
