"""Opens the tokeniser that goes with a model."""

from __future__ import annotations

from pathlib import Path

from moonpool.engine.builtin import BYTE_TOKENIZER
from moonpool.engine.tokenizer import Tokenizer
from moonpool.engine.tokenizers.byte import ByteTokenizer
from moonpool.engine.tokenizers.huggingface import HfTokenizer


def open_tokenizer(source: str, vocab_size: int) -> Tokenizer:
    """`source` is what `LoadedModel.tokenizer` says. Raises `TokenizerError`."""
    if source == BYTE_TOKENIZER:
        return ByteTokenizer(vocab_size)
    return HfTokenizer(Path(source))
