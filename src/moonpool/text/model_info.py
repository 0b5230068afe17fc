"""What the API needs of a model: vocabulary, end tokens, tokenizer. Any architecture will do: its
weights are not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from moonpool.text.fields import Fields
from moonpool.text.model_folder import WORD_PATTERNS, find_folder, read_config, sampling_defaults
from moonpool.text.tokenizer import Tokenizer, TokenizerParts
from moonpool.text.tokenizers.byte import ByteTokenizer
from moonpool.text.tokenizers.huggingface import HfTokenizer
from moonpool.types import Pooling

BYTE_TOKENIZER = "bytes"


class AdapterInfo(Protocol):
    """A LoRA adapter. `fingerprint` identifies its content, in every process."""

    @property
    def name(self) -> str: ...

    @property
    def folder(self) -> Path: ...

    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the API needs of a model: vocabulary, end tokens, context length, tokenizer.

    `tokenizer`: `BYTE_TOKENIZER` (bytes 0..255, then bos 256, eos 257, pad 258), or the folder with
    the tokenizer's files, or the GGUF file. `max_positions` 0 means unknown.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_positions: int
    tokenizer: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    hidden_size: int = 0
    pooling: Pooling = "none"  # how embeddings are made; "none" if this engine computes none
    adapters: tuple[AdapterInfo, ...] = ()


def read_model_info(name: str) -> ModelInfo:
    """The info of a model in a folder, or in the Hugging Face Hub, that external engines compute.
    Raises `ModelError`."""
    folder = find_folder(name, WORD_PATTERNS)
    config = Fields(read_config(folder), str(folder / "config.json"))
    words = config.within("text_config").over(config)  # multimodal models
    vocab_size = words.positive("vocab_size")
    ends = (*config.token_ids("eos_token_id"), *words.token_ids("eos_token_id"))
    return ModelInfo(
        vocab_size,
        tuple(end for end in dict.fromkeys(ends) if end < vocab_size),
        # unknown: the external engine reports it, because RoPE scaling extends the number in
        # config.json
        0,
        str(folder),
        sampling_defaults(folder),
    )


def open_tokenizer(source: str, vocab_size: int, parts: TokenizerParts | None = None) -> Tokenizer:
    """Opens the tokenizer that `ModelInfo.tokenizer` names. `parts`: what it is made of, if it is
    in no folder. Raises `TokenizerError`."""
    if source == BYTE_TOKENIZER:
        return ByteTokenizer(vocab_size)
    return HfTokenizer(parts or Path(source))
