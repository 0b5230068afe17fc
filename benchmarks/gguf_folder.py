"""Writes a Llama-shaped GGUF model as a checkpoint's folder, for engines that read no GGUF: `python
-m benchmarks.gguf_folder smollm2 FOLDER`. The weights are dequantised to bfloat16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moonpool.text.model_error import ModelError
from moonpool.text.tokenizer import TokenizerError, TokenizerParts
from moonpool_engine.engine.builtin import export_checkpoint, open_model
from moonpool_engine.engine.gguf.files import gguf_file
from moonpool_engine.engine.gguf.reader import read_gguf
from moonpool_engine.engine.gguf.tokenizer import tokenizer_parts

USAGE = "usage: python -m benchmarks.gguf_folder MODEL FOLDER (MODEL: a GGUF file, or smollm2)"


def write_folder(name: str, folder: Path) -> None:
    """Raises ModelError, TokenizerError, OSError."""
    path = gguf_file(name)
    if path is None:
        raise ModelError(f"{name} is no GGUF model")
    parts = tokenizer_parts(read_gguf(path))
    export_checkpoint(open_model(name, "bfloat16"), folder)
    _write_tokenizer(parts, folder)


def write_tokenizer(name: str, folder: Path) -> None:
    """Writes only what `transformers` reads a tokenizer from. Raises as `write_folder`."""
    path = gguf_file(name)
    if path is None:
        raise ModelError(f"{name} is no GGUF model")
    _write_tokenizer(tokenizer_parts(read_gguf(path)), folder)


def _write_tokenizer(parts: TokenizerParts, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(parts.source)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **parts.special_tokens}
    if parts.template is not None:
        config["chat_template"] = parts.template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def main() -> int:
    """Returns the exit status."""
    if len(sys.argv) != 3:
        sys.stderr.write(USAGE + "\n")
        return 2
    try:
        write_folder(sys.argv[1], Path(sys.argv[2]))
    except (ModelError, TokenizerError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
