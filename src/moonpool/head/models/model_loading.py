"""What the HTTP layer needs of a model: its card and its tokenizer, read without its weights.

The files of a model come from outside: a tokenizer or a chat template may take any time and memory
to load. So a process with limits loads them first (`begin_reader`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from moonpool import __version__
from moonpool.api.body_pool import body_start, is_foreign
from moonpool.api.body_reading.client import BodyClient, ForkedReader
from moonpool.api.serving_backend import AdapterCard, ApiOptions, ModelCard
from moonpool.config.rules import lora_module
from moonpool.config.tables import Config, ModelConfig
from moonpool.head.cluster_error import ClusterError
from moonpool.plugins.engines import BUILT_IN, own_engine
from moonpool.protocol.model_offer import ModelOffer
from moonpool.text.model_error import ModelError
from moonpool.text.model_folder import GGUF_SUFFIX
from moonpool.text.model_info import BYTE_TOKENIZER, ModelInfo, open_tokenizer, read_model_info
from moonpool.text.tokenizer import Tokenizer, TokenizerError, TokenizerParts, unlike
from moonpool.types import Pooling

log = logging.getLogger("moonpool")

STAND_IN_VOCABULARY = 512
UNKNOWN_TOKENS = 1 << 30
"""The context length of a model whose files state none. The pools of the instances limit it
further."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the files of a model say, except for the tokenizer.

    `parts`: the parts of a tokenizer that is not in a folder. `chat_template`: the source of a
    template that is used in place of the model's own. `drafts`: the draft model, if the
    configuration names one."""

    info: ModelInfo
    parts: TokenizerParts | None = None
    chat_template: str = ""
    drafts: ModelInfo | None = None


@dataclass(frozen=True, slots=True)
class ApiModel:
    """`source` names the tokenizer, `parts` are what it is made from if its file is not a folder,
    and `chat_template` is the template to use in place of its own: for processes that read bodies.
    `reader` is such a process, which has loaded both, or None if none runs yet."""

    card: ModelCard
    tokenizer: Tokenizer
    source: str = ""
    parts: TokenizerParts | None = None
    chat_template: str = ""
    reader: BodyClient | None = None

    def options(self, shared: ApiOptions) -> ApiOptions:
        """Returns the options of this model's endpoints, made from the server's options."""
        return replace(
            shared,
            tokenizer=self.source,
            tokenizer_parts=self.parts,
            chat_template=self.chat_template,
        )


async def load_model(
    config: Config, is_new: bool = True, forked: ForkedReader | None = None
) -> ApiModel:
    """Loads the model that the configuration names, for Moonpool's own engine. `is_new`: whether no
    earlier head has loaded it. `forked`: a forked process that reads the model's bodies. Raises
    ClusterError."""
    files = _read_files(config)
    reader = await begin_reader(files, is_new, forked)
    try:
        tokenizer = _open_tokenizer(files)
        if files.drafts is not None:
            source = files.drafts.tokenizer
            parts = _tokenizer_parts(source)
            drafts = open_tokenizer(source, files.drafts.vocab_size, parts)
            _check_alike(config, unlike(tokenizer, drafts))
        card = _own_card(config, files.info)
    except (ClusterError, TokenizerError) as error:
        _end(reader)
        raise ClusterError(str(error)) from None
    for note in files.info.notes:
        log.info("%s", note)
    return _api_model(card, tokenizer, files, reader)


async def load_offered(
    config: Config, offer: ModelOffer, is_first: bool, is_new: bool = True
) -> ApiModel:
    """Loads the model that a vLLM server offers. `is_first`: whether the names, adapters and
    template of the configuration apply to it. `is_new`: whether no earlier head has loaded it.
    Raises ClusterError."""
    settings = _settings_of(config, is_first)
    if offer.takes != "text":
        try:
            return await _load_tokens(config, offer, settings, is_new)
        except ClusterError as error:
            if offer.takes == "tokens":
                raise
            text = "calls for %s go to its servers as they are, for its tokens are unknown: %s"
            log.info(text, offer.names[0], error)
    return _load_text(config, offer, settings)


async def _load_tokens(
    config: Config, offer: ModelOffer, settings: ModelConfig, is_new: bool
) -> ApiModel:
    """Raises ClusterError."""
    files = await asyncio.to_thread(_read_offered, offer, settings)
    try:
        reader = await begin_reader(files, is_new)
    except ClusterError as error:
        if files.chat_template:
            raise
        raise ClusterError(_why_unreadable(offer, error)) from None
    try:
        tokenizer = await asyncio.to_thread(_open_tokenizer, files)
    except TokenizerError as error:
        _end(reader)
        raise ClusterError(_why_unreadable(offer, error)) from None
    card = _offered_card(config, offer, settings, files.info)
    return _api_model(card, tokenizer, files, reader)


def _load_text(config: Config, offer: ModelOffer, settings: ModelConfig) -> ApiModel:
    """Loads a model whose tokens are unknown to the head. Its stand-in tokenizer reads no calls."""
    unknown = ModelInfo(0, (), 0, BYTE_TOKENIZER)
    card = _offered_card(config, offer, settings, unknown)
    card = msgspec.structs.replace(card, forwards_all=True)
    return ApiModel(card, open_tokenizer(BYTE_TOKENIZER, STAND_IN_VOCABULARY), BYTE_TOKENIZER)


def named_offer(name: str) -> ModelOffer:
    """Returns the offer of a model that the configuration names, to use until a server of this
    model joins."""
    return ModelOffer(root=name, names=(name,), max_model_tokens=UNKNOWN_TOKENS)


async def begin_reader(
    files: ModelFiles, waits: bool, forked: ForkedReader | None = None
) -> BodyClient | None:
    """Starts the process that reads small bodies, if one is used. `waits`: whether to wait until it
    has loaded the tokenizers for the first time. `forked`: a process that already runs; it is ended
    if it is not used. Raises ClusterError."""
    if waits and files.drafts is not None and files.drafts.tokenizer != BYTE_TOKENIZER:
        await _load_apart(files.drafts)
    options = _options(files)
    if not is_foreign(options):
        if forked is not None:
            forked.close()
        return None
    reader = BodyClient(body_start(options, files.info.vocab_size), forked)
    starting = reader.begin()
    if waits:
        trouble = await starting
        if trouble:
            reader.end()
            raise ClusterError(trouble)
    return reader


async def _load_apart(drafts: ModelInfo) -> None:
    try:
        parts = _tokenizer_parts(drafts.tokenizer)
    except TokenizerError as error:
        raise ClusterError(str(error)) from None
    process = BodyClient(body_start(_options(ModelFiles(drafts, parts)), drafts.vocab_size))
    trouble = await process.begin()
    process.end()
    if trouble:
        raise ClusterError(f"the draft model: {trouble}")


def _end(reader: BodyClient | None) -> None:
    if reader is not None:
        reader.end()


def _options(files: ModelFiles) -> ApiOptions:
    return ApiOptions(
        tokenizer=files.info.tokenizer,
        tokenizer_parts=files.parts,
        chat_template=files.chat_template,
    )


def _api_model(
    card: ModelCard, tokenizer: Tokenizer, files: ModelFiles, reader: BodyClient | None
) -> ApiModel:
    return ApiModel(card, tokenizer, files.info.tokenizer, files.parts, files.chat_template, reader)


# Files


def _read_files(config: Config) -> ModelFiles:
    """Raises ClusterError."""
    try:
        info = _model_info(config)
        return ModelFiles(
            info,
            _tokenizer_parts(info.tokenizer),
            _read_template(config.model.chat_template),
            _draft_info(config),
        )
    except (ModelError, TokenizerError) as error:
        raise ClusterError(str(error)) from None


def _read_offered(offer: ModelOffer, settings: ModelConfig) -> ModelFiles:
    """Raises ClusterError."""
    template = _read_template(settings.chat_template)
    try:
        is_gguf = offer.takes == "either" and offer.root.endswith(GGUF_SUFFIX)
        if offer.root.startswith(BUILT_IN) or is_gguf:
            info = own_engine().model_info(offer.root, settings.dtype)
        else:
            info = read_model_info(offer.root)
        return ModelFiles(info, _tokenizer_parts(info.tokenizer), template)
    except (ModelError, TokenizerError) as error:
        raise ClusterError(_why_unreadable(offer, error)) from None
    except ModuleNotFoundError as error:
        if not is_gguf:
            raise
        raise ClusterError(f"GGUF files are read by the package {error.name}") from None


def _settings_of(config: Config, is_first: bool) -> ModelConfig:
    if is_first:
        return config.model
    return msgspec.structs.replace(
        config.model, served_name="", lora_modules=(), chat_template="", max_model_tokens=0
    )


def _why_unreadable(offer: ModelOffer, error: Exception) -> str:
    if offer.takes == "tokens" and offer.root.endswith(GGUF_SUFFIX):
        return (
            f"vLLM serves the GGUF file {offer.root}: name the folder with its config.json and"
            " tokenizer, too, as MODEL"
        )
    return f"config and tokenizer of the server's model cannot be read here: {error}"


def _model_info(config: Config) -> ModelInfo:
    """Raises ModelError."""
    model = config.model
    return own_engine().model_info(model.name, model.dtype, model.lora_modules)


def _draft_info(config: Config) -> ModelInfo | None:
    """Raises ModelError."""
    settings = config.engine.speculative_config
    if settings is None or not settings.model:
        return None
    return own_engine().model_info(settings.model, config.model.dtype)


def _tokenizer_parts(source: str) -> TokenizerParts | None:
    """Returns None if the tokenizer is read from a folder. Raises TokenizerError."""
    path = Path(source)
    return own_engine().gguf_parts(path) if path.suffix == GGUF_SUFFIX else None


def _open_tokenizer(files: ModelFiles) -> Tokenizer:
    """Raises TokenizerError."""
    tokenizer = open_tokenizer(files.info.tokenizer, files.info.vocab_size, files.parts)
    if files.chat_template:
        tokenizer.use_chat_template(files.chat_template)
    return tokenizer


def _check_alike(config: Config, found: str) -> None:
    """Raises ClusterError if the draft model has another vocabulary."""
    settings = config.engine.speculative_config
    if found and settings is not None:
        raise ClusterError(
            f"the draft model {settings.model} has another vocabulary than {config.model.name}:"
            f" {found}; use a draft model with the same tokenizer"
        )


def _read_template(path: str) -> str:
    """Returns the source of a template that is given, or "" if none is given."""
    try:
        return Path(path).read_text(encoding="utf-8") if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"--chat-template {path} cannot be read: {error}") from None


# Cards


def _own_card(config: Config, model: ModelInfo) -> ModelCard:
    """Raises ClusterError."""
    name, longest = config.model.name, model.max_positions
    wanted = config.model.max_model_tokens
    if longest and wanted > longest:
        raise ClusterError(
            f"max_model_len {wanted} exceeds the {longest} tokens that {name} supports; lower it"
        )
    no_embeddings = _why_no_embeddings(config, model.pooling)
    return ModelCard(
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
        system_fingerprint=system_fingerprint(config, name),
    )


def _offered_card(
    config: Config, offer: ModelOffer, settings: ModelConfig, model: ModelInfo
) -> ModelCard:
    pairs = [lora_module(text) for text in settings.lora_modules]
    return ModelCard(
        model_id=settings.served_name or offer.names[0],
        created_s=int(time.time()),
        max_model_tokens=settings.max_model_tokens or UNKNOWN_TOKENS,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        root=offer.root,
        no_embeddings="its vLLM servers have no such endpoint",
        grammar_waits=False,
        sampling=dict(model.sampling),
        adapters=tuple(AdapterCard(name=name, adapter=name, root=path) for name, path in pairs),
        system_fingerprint=system_fingerprint(config, offer.root),
    )


def system_fingerprint(config: Config, root: str) -> str:
    """Returns a text that names the release and the model with its number formats, in OpenAI's
    form."""
    made = hashlib.blake2b(__version__.encode(), digest_size=5)
    model = msgspec.structs.replace(config.model, name=root)
    made.update(msgspec.json.encode((config.engine.kind, model)))
    return f"fp_{made.hexdigest()}"


def _why_no_embeddings(config: Config, pooling: Pooling) -> str:
    """Returns why some instances compute no embeddings, or "" if all compute them."""
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
    """Whether each instance computes the final hidden states and the logits in its own process."""
    engine = config.engine
    degrees = (
        engine.pipeline_parallel_size,
        engine.decode_pipeline_parallel_size,
        engine.tensor_parallel_size,
        engine.decode_tensor_parallel_size,
    )
    return max(degrees) <= 1 and not config.cluster.attention
