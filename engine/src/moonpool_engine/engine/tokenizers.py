"""Tokenizers of models that this engine computes: of folders, and of GGUF files."""

from __future__ import annotations

from pathlib import Path

from moonpool.text.model_folder import GGUF_SUFFIX
from moonpool.text.model_info import open_tokenizer as open_folder_tokenizer
from moonpool.text.tokenizer import Tokenizer, Vocabulary
from moonpool_engine.engine.gguf.tokenizer import GgufVocabulary, gguf_parts


def open_tokenizer(source: str, vocab_size: int) -> Tokenizer:
    """Opens the tokenizer named by `LoadedModel.tokenizer`. Raises `TokenizerError`."""
    path = Path(source)
    parts = gguf_parts(path) if path.suffix == GGUF_SUFFIX else None
    return open_folder_tokenizer(source, vocab_size, parts)


def open_vocabulary(source: str, vocab_size: int) -> Vocabulary:
    """Opens the tokens of that tokenizer, which is faster if its file lists them. Raises
    `TokenizerError`."""
    path = Path(source)
    if path.suffix != GGUF_SUFFIX:
        return open_folder_tokenizer(source, vocab_size)
    return GgufVocabulary(path)
