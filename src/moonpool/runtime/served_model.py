"""The model that a head serves: what its files say, and its tokenizer.

The files come from elsewhere. A tokenizer, and a chat template, may take any time and memory to
load. So a process with limits loads them first, and this one only what that one could.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moonpool.api.body_client import BodyClient
from moonpool.api.body_pool import body_start, is_foreign
from moonpool.api.frontend import ApiOptions
from moonpool.config import Config
from moonpool.engine.model_info import (
    BYTE_TOKENIZER,
    ModelInfo,
    model_info_without_weights,
    open_tokenizer,
    tokenizer_parts,
)
from moonpool.engine.spec import ModelError
from moonpool.engine.tokenizer import Tokenizer, TokenizerError, TokenizerParts, unlike
from moonpool.runtime.cluster_error import ClusterError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`parts`: of a tokenizer that is in no folder. `chat_template`: the source of one that is used
    in place of the model's own. `drafts`: the draft model, if there is one."""

    info: ModelInfo
    parts: TokenizerParts | None
    chat_template: str
    drafts: ModelInfo | None


def read_model(config: Config) -> ServedModel:
    """Reads the files but for the tokenizer. Raises ClusterError."""
    try:
        info = _model_info(config)
        return ServedModel(
            info,
            tokenizer_parts(info.tokenizer),
            _read_template(config.model.chat_template),
            _draft_info(config),
        )
    except (ModelError, TokenizerError) as error:
        raise ClusterError(str(error)) from None


async def begin_reader(
    model: ServedModel, options: ApiOptions, is_first: bool
) -> BodyClient | None:
    """Starts the process that reads small bodies, where there is one. The first head waits until
    it has loaded the tokenizers. Raises ClusterError."""
    if is_first and model.drafts is not None and model.drafts.tokenizer != BYTE_TOKENIZER:
        await _load_apart(model.drafts)
    if not is_foreign(options):
        return None
    reader = BodyClient(body_start(options, model.info.vocab_size))
    starting = reader.begin()
    if is_first:
        trouble = await starting
        if trouble:
            reader.end()
            raise ClusterError(trouble)
    return reader


async def _load_apart(drafts: ModelInfo) -> None:
    try:
        parts = tokenizer_parts(drafts.tokenizer)
    except TokenizerError as error:
        raise ClusterError(str(error)) from None
    options = ApiOptions(tokenizer=drafts.tokenizer, tokenizer_parts=parts)
    process = BodyClient(body_start(options, drafts.vocab_size))
    trouble = await process.begin()
    process.end()
    if trouble:
        raise ClusterError(f"the draft model: {trouble}")


def load_tokenizer(config: Config, model: ServedModel) -> Tokenizer:
    """Raises ClusterError; also if the draft model has another vocabulary."""
    info = model.info
    try:
        tokenizer = open_tokenizer(info.tokenizer, info.vocab_size, model.parts)
        if model.chat_template:
            tokenizer.use_chat_template(model.chat_template)
        if model.drafts is not None:
            drafts = open_tokenizer(model.drafts.tokenizer, model.drafts.vocab_size)
            _check_alike(config, unlike(tokenizer, drafts))
    except TokenizerError as error:
        raise ClusterError(str(error)) from None
    return tokenizer


def _check_alike(config: Config, found: str) -> None:
    settings = config.engine.speculative_config
    if found and settings is not None:
        raise ClusterError(
            f"the draft model {settings.model} has another vocabulary than {config.model.name}:"
            f" {found}; use a draft model with the same tokenizer"
        )


def _model_info(config: Config) -> ModelInfo:
    """Raises ModelError."""
    if config.engine.kind == "vllm":
        return model_info_without_weights(config.model.name, config.model.dtype)
    from moonpool.engine.builtin import model_info  # needs torch

    return model_info(config.model.name, config.model.dtype, config.model.lora_modules)


def _draft_info(config: Config) -> ModelInfo | None:
    """Raises ModelError."""
    settings = config.engine.speculative_config
    if settings is None or not settings.model:
        return None
    from moonpool.engine.builtin import model_info  # needs torch

    return model_info(settings.model, config.model.dtype)


def _read_template(path: str) -> str:
    """The source of a template that is given; "" if none is."""
    try:
        return Path(path).read_text(encoding="utf-8") if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"--chat-template {path} cannot be read: {error}") from None
