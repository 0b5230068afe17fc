"""What the HTTP layer needs of a model: its card and its tokenizer, read without its weights."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moonpool.api.frontend import AdapterCard, ModelCard
from moonpool.config import Config
from moonpool.config_rules import lora_module
from moonpool.engine.gguf.files import GGUF_SUFFIX
from moonpool.engine.model_info import ModelInfo, model_info_without_weights, open_tokenizer
from moonpool.engine.spec import ModelError
from moonpool.engine.tokenizer import ChatTemplateError, Tokenizer, TokenizerError, unlike
from moonpool.protocol.model_offer import ModelOffer
from moonpool.runtime.cluster_error import ClusterError
from moonpool.types import Pooling

log = logging.getLogger("moonpool")

UNKNOWN_TOKENS = 1 << 30
"""The context of a model whose files state none. The instances' pools limit it."""


@dataclass(frozen=True, slots=True)
class ApiModel:
    """`source` names the tokenizer, and `chat_template` is the template to use in place of its own,
    for processes that read large bodies."""

    card: ModelCard
    tokenizer: Tokenizer
    source: str
    chat_template: str


def load_model(config: Config) -> ApiModel:
    """The model that the configuration names. Raises ClusterError."""
    name = config.model.name
    template = _read_template(config.model.chat_template) if config.model.chat_template else ""
    try:
        model = _model_info(config)
        tokenizer = _open_tokenizer(model, config, template)
        _check_draft_model(config, tokenizer)
    except (ModelError, TokenizerError) as error:
        raise ClusterError(str(error)) from None
    longest = model.max_positions
    wanted = config.model.max_model_tokens
    if longest and wanted > longest:
        raise ClusterError(
            f"max_model_len {wanted} exceeds the {longest} tokens that {name} supports; lower it"
        )
    no_embeddings = _why_no_embeddings(config, model.pooling)
    card = ModelCard(
        model_id=config.model.served_name or name,
        created_s=int(time.time()),
        max_model_tokens=wanted or longest or UNKNOWN_TOKENS,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        root=name,
        scores_prompts=_computes_here(config),
        embedding_size=0 if no_embeddings else model.hidden_size,
        no_embeddings=no_embeddings,
        pooling=model.pooling,
        sampling=dict(model.sampling),
        adapters=tuple(
            AdapterCard(name=a.name, adapter=a.fingerprint, root=str(a.folder))
            for a in model.adapters
        ),
    )
    return ApiModel(card, tokenizer, model.tokenizer, template)


def load_offered(config: Config, offer: ModelOffer, is_first: bool) -> ApiModel:
    """The model of a vLLM server. `is_first`: the names, adapters and template of the configuration
    are meant for it. Raises ClusterError."""
    settings = config.model
    if not is_first:
        settings = msgspec.structs.replace(
            settings, served_name="", lora_modules=(), chat_template="", max_model_tokens=0
        )
    template = _read_template(settings.chat_template) if settings.chat_template else ""
    try:
        model = model_info_without_weights(offer.root, settings.dtype)
        tokenizer = _open_tokenizer(model, config, template)
    except (ModelError, TokenizerError) as error:
        raise ClusterError(_why_unreadable(offer, error)) from None
    pairs = [lora_module(text) for text in settings.lora_modules]
    card = ModelCard(
        model_id=settings.served_name or offer.names[0],
        created_s=int(time.time()),
        max_model_tokens=settings.max_model_tokens or UNKNOWN_TOKENS,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        root=offer.root,
        no_embeddings="its vLLM servers have no such endpoint",
        sampling=dict(model.sampling),
        adapters=tuple(AdapterCard(name=name, adapter=name, root=path) for name, path in pairs),
    )
    return ApiModel(card, tokenizer, model.tokenizer, template)


def _why_unreadable(offer: ModelOffer, error: Exception) -> str:
    if offer.root.endswith(GGUF_SUFFIX):
        return (
            f"vLLM serves the GGUF file {offer.root}: name the folder with its config.json and"
            " tokenizer, too, as MODEL"
        )
    return f"config and tokenizer of vLLM's model cannot be read here: {error}"


def _model_info(config: Config) -> ModelInfo:
    """Raises ModelError."""
    from moonpool.engine.builtin import model_info  # needs torch

    found = model_info(config.model.name, config.model.dtype, config.model.lora_modules)
    for note in found.notes:
        log.info("%s", note)
    return found


def _open_tokenizer(model: ModelInfo, config: Config, template: str) -> Tokenizer:
    """Raises TokenizerError, and ClusterError for a chat template that is no template."""
    tokenizer = open_tokenizer(model.tokenizer, model.vocab_size)
    if template:
        try:
            tokenizer.use_chat_template(template)
        except ChatTemplateError as error:
            raise ClusterError(f"{config.model.chat_template}: {error}") from None
    return tokenizer


def _check_draft_model(config: Config, tokenizer: Tokenizer) -> None:
    """Raises ModelError and TokenizerError if the draft model does not fit the model."""
    settings = config.engine.speculative_config
    if settings is None or not settings.model:
        return
    from moonpool.engine.builtin import model_info  # needs torch

    drafts = model_info(settings.model, config.model.dtype)
    found = unlike(tokenizer, open_tokenizer(drafts.tokenizer, drafts.vocab_size))
    if found:
        raise ModelError(
            f"the draft model {settings.model} has another vocabulary than {config.model.name}:"
            f" {found}; use a draft model with the same tokenizer"
        )


def _why_no_embeddings(config: Config, pooling: Pooling) -> str:
    """ "" if all instances compute them."""
    engine = config.engine
    if config.cluster.attention:
        return "instances with attention workers have no hidden states to pool"
    if pooling == "none":
        return "the model pools in a way that is not computed here (see the log)"
    stages = max(engine.pipeline_parallel_size, engine.decode_pipeline_parallel_size)
    if pooling == "mean" and stages > 1:
        return "the model's mean over all tokens needs instances without pipeline stages"
    return ""


def _computes_here(config: Config) -> bool:
    """Whether each instance has the final hidden states and the logits in its own process."""
    engine = config.engine
    degrees = (
        engine.pipeline_parallel_size,
        engine.decode_pipeline_parallel_size,
        engine.tensor_parallel_size,
        engine.decode_tensor_parallel_size,
    )
    return max(degrees) <= 1 and not config.cluster.attention


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"--chat-template {path} cannot be read: {error}") from None
