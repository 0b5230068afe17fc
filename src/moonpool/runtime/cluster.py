"""Runs one head from start to end: the Conductor's driver and the HTTP server."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from moonpool import __version__
from moonpool.api.access.protection import UNPROTECTED, open_keys, open_peer_tls, open_tls
from moonpool.api.app import http_server, make_app
from moonpool.api.body_pool import BodyReader, body_start, is_foreign
from moonpool.api.body_reading.client import BodyClient
from moonpool.api.frontend import AdapterCard, ApiOptions, ModelCard
from moonpool.api.keys import NO_KEYS, ApiKeys
from moonpool.api.output_text.formats import UnknownParserError, check_parsers
from moonpool.config import Config, ConfigError
from moonpool.config_rules import check_values, lora_module
from moonpool.cores import (
    CoreShare,
    format_cores,
    pin_thread,
    read_cores,
    share_cores,
    threads_per_process,
    usable_cores,
)
from moonpool.engine.model_info import (
    BYTE_TOKENIZER,
    ModelInfo,
    model_info_without_weights,
    open_tokenizer,
    tokenizer_parts,
)
from moonpool.engine.spec import ModelError
from moonpool.engine.tokenizer import Tokenizer, TokenizerError, TokenizerParts, unlike
from moonpool.gc_tuning import settle_memory
from moonpool.runtime.cluster_error import ClusterError
from moonpool.runtime.head import Head
from moonpool.runtime.head_drain import drain
from moonpool.runtime.launcher import local_instances
from moonpool.runtime.supervisor_link import Inheritance, SupervisorLink
from moonpool.types import Pooling

log = logging.getLogger("moonpool")

START_S = 300.0
UNKNOWN_TOKENS = 1 << 30
"""The context of a model whose files state none. The instances' pools limit it."""


async def serve_cluster(link: SupervisorLink) -> None:
    """Serves as the head of one cluster until the supervisor ends it. Raises ClusterError."""
    inherited = await link.inherit()
    begin = inherited.begin
    config = resolved(begin.config, computes_here=begin.launch)
    try:
        tls, peer_tls, keys = open_tls(config), open_peer_tls(config), open_keys(config)
    except UNPROTECTED as error:
        raise ClusterError(str(error)) from None
    model = read_model(config)
    options = _api_options(config, model, keys)
    reader = await begin_reader(model, options, begin.is_first)
    head = _make_head(config, model, begin.secret, keys)
    head.on_silent, head.on_instances = link.kill, link.know
    link.on_crash = head.note_crash
    head.succession, head.num_restarts = link, begin.num_restarts
    head.num_upgrades, head.standbys.epoch = begin.num_upgrades, begin.epoch
    await head.start(inherited.control, peer_tls)
    if begin.launch:
        head.note_launched(name for _, name in local_instances(config.cluster))
    if begin.expected:
        head.expect(begin.expected)
    bodies = BodyReader(head, options, reader)
    answers = head.standbys.answers
    answers.enders = link.enders
    head.work.mark = link.mark
    for kept in inherited.cut_answers:
        answers.adopt(kept)
    app = make_app(head, options, bodies)
    server = http_server(app, tls=tls, keeper=link, answers=answers, mark=link.mark)
    beat = asyncio.create_task(link.beat())
    await _begin(link, head, config, inherited)
    for received, sock in inherited.answers:
        await server.resume(sock, received)
    for sock in inherited.connections:
        await server.adopt(sock)
    broken: list[str] = []
    serving = asyncio.create_task(server.serve(sockets=[inherited.http]))
    for task in (serving, head.ticker, beat):
        task.add_done_callback(partial(_note_failure, broken, link.stop))
    if not link.stop.is_set():
        link.up()
        await link.stop.wait()
    if broken:  # the next head goes on with the workers and the answers
        raise ClusterError(broken[0])
    if link.hands_over:
        head.end_views()
        await server.hand_over(link.pass_on, config.api.drain_seconds)
        bodies.close()
        await link.flush()
        os._exit(0)  # at once: an end in order would end the answers, which go on
    log.info("stopping")
    await drain(head, config.api.drain_seconds)
    link.ending()
    server.should_exit = True
    await asyncio.wait([serving])
    bodies.close()
    await head.stop()
    beat.cancel()


async def _begin(link: SupervisorLink, head: Head, config: Config, inherited: Inheritance) -> None:
    """Waits for the workers of the first head, and says where the cluster is. A further head serves
    at once: its requests wait for the workers."""
    begin = inherited.begin
    shares = _shares(config) if begin.launch else []
    link.prepared(shares, threads_per_process(config))
    if begin.launch:
        pin_thread(shares[0].others if shares else ())
    if begin.is_first and begin.launch:
        await _wait_for_workers(head, config.cluster.num_instances, link.stop)
    if begin.is_first and not begin.launch:
        log.info("waiting for workers at %s:%d", *inherited.control.getsockname()[:2])
    settle_memory()
    if not link.stop.is_set():
        host = f"[{config.api.host}]" if ":" in config.api.host else config.api.host
        scheme = "https" if config.api.ssl_certfile else "http"
        url = f"{scheme}://{host}:{inherited.http.getsockname()[1]}"
        again = "" if begin.is_first else " again"
        log.info("serving %s%s at %s (Ctrl-C ends it)", config.model.name, again, url)


def _note_failure(broken: list[str], stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Ends a head that has lost its ticker or its HTTP server, so that it can be restarted."""
    if task.cancelled() or task.exception() is None:
        return
    error = task.exception()
    log.error("the head failed", exc_info=error)
    broken.append(f"the head failed: {type(error).__name__}: {error}; see the log above")
    stop.set()


async def _wait_for_workers(head: Head, count: int, stop: asyncio.Event) -> None:
    """Waits until all workers have joined. Raises ClusterError if one fails or time runs out."""
    joined = asyncio.create_task(head.wait_for_instances(count))
    failed = asyncio.create_task(head.start_failures.get())
    stopped = asyncio.create_task(stop.wait())
    tasks = {joined, failed, stopped}
    try:
        done, _ = await asyncio.wait(tasks, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    if failed in done:
        raise ClusterError(failed.result())
    if not done:
        raise ClusterError(f"the workers did not start within {START_S:.0f} s; see the log above")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the files of the model say. They come from elsewhere: a tokenizer, and a chat template,
    may take any time and memory to load. So a process with limits loads them first: `begin_reader`.

    `parts`: of a tokenizer that is in no folder. `chat_template`: the source of one that is used
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


def resolved(config: Config, computes_here: bool = False) -> Config:
    """Resolves device and dtype, so that all instances agree on them.

    Raises ClusterError if other settings do not fit the device that was found, or if the engines
    are on this machine, and it lacks the device.
    """
    if config.engine.kind == "vllm":  # its servers choose both
        device, dtype = "cpu", "float32"
    else:
        from moonpool.engine import device as devices  # needs torch

        device = devices.resolve_device(config.engine.device)
        try:
            devices.check_device(device if computes_here else "cpu")
        except devices.DeviceError as error:
            raise ClusterError(str(error)) from None
        dtype = devices.resolve_dtype(config.model.dtype, device)
    engine = msgspec.structs.replace(config.engine, device=device)
    model = msgspec.structs.replace(config.model, dtype=dtype)
    settled = msgspec.structs.replace(config, model=model, engine=engine)
    try:
        check_values(settled)
    except ConfigError as error:
        raise ClusterError(str(error)) from None
    return settled


def _make_head(config: Config, served: ServedModel, secret: bytes, keys: ApiKeys = NO_KEYS) -> Head:
    """Raises ClusterError."""
    model, tokenizer = served.info, load_tokenizer(config, served)
    for note in model.notes:
        log.info("%s", note)
    longest = model.max_positions
    wanted = config.model.max_model_tokens
    if longest and wanted > longest:
        raise ClusterError(
            f"max_model_len {wanted} exceeds the {longest} tokens that {config.model.name}"
            " supports; lower it"
        )
    no_embeddings = _why_no_embeddings(config, model.pooling)
    card = ModelCard(
        model_id=config.model.served_name or config.model.name,
        created_s=int(time.time()),
        max_model_tokens=wanted or longest or UNKNOWN_TOKENS,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        scores_prompts=_computes_here(config),
        embedding_size=0 if no_embeddings else model.hidden_size,
        no_embeddings=no_embeddings,
        pooling=model.pooling,
        grammar_waits=config.engine.kind != "vllm",
        sampling=dict(model.sampling),
        adapters=_adapter_cards(config, model),
        system_fingerprint=_system_fingerprint(config),
    )
    try:
        return Head(
            config,
            card,
            tokenizer,
            secret,
            tenant_shares=keys.shares,
            tenant_caches=keys.cache_shares,
        )
    except ConfigError as error:
        raise ClusterError(str(error)) from None


def _system_fingerprint(config: Config) -> str:
    """Names the release and the model with its number formats, in the form that OpenAI has."""
    made = hashlib.blake2b(__version__.encode(), digest_size=5)
    made.update(msgspec.json.encode((config.engine.kind, config.model)))
    return f"fp_{made.hexdigest()}"


def _adapter_cards(config: Config, model: ModelInfo) -> tuple[AdapterCard, ...]:
    """vLLM servers load their adapters themselves, and know them by name."""
    if config.engine.kind == "vllm":
        pairs = map(lora_module, config.model.lora_modules)
        return tuple(AdapterCard(name=name, adapter=name, root=path) for name, path in pairs)
    return tuple(
        AdapterCard(name=a.name, adapter=a.fingerprint, root=str(a.folder)) for a in model.adapters
    )


def _why_no_embeddings(config: Config, pooling: Pooling) -> str:
    """ "" if all instances compute them."""
    engine = config.engine
    if engine.kind != "moonpool":
        return "vLLM servers behind it are asked for tokens only"
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
    return engine.kind == "moonpool" and max(degrees) <= 1 and not config.cluster.attention


def _api_options(config: Config, model: ServedModel, keys: ApiKeys) -> ApiOptions:
    """Raises ClusterError."""
    try:
        check_parsers(config.api.tool_call_parser, config.api.reasoning_parser)
    except UnknownParserError as error:
        raise ClusterError(str(error)) from None
    return ApiOptions(
        api_keys=keys.tenants,
        admins=keys.admins,
        limits=keys.limits,
        served_names=(config.model.served_name,) if config.model.served_name else (),
        max_body_bytes=config.api.max_body_bytes,
        allowed_origins=config.api.allowed_origins,
        allowed_hosts=config.api.allowed_hosts,
        tokenizer=model.info.tokenizer,
        tokenizer_parts=model.parts,
        keepalive_s=config.api.keepalive_s,
        strict_max_tokens=config.api.strict_max_tokens,
        exports_traces=bool(config.telemetry.otlp_traces_endpoint),
        tool_call_parser=config.api.tool_call_parser,
        reasoning_parser=config.api.reasoning_parser,
        chat_template=model.chat_template,
    )


def _shares(config: Config) -> list[CoreShare]:
    """Returns the cores of each worker, or an empty list if workers are not pinned."""
    engine = config.engine
    if engine.pinning == "off" or engine.device != "cpu" or engine.kind == "vllm":
        return []
    if config.cluster.attention:
        return []
    threads = threads_per_process(config)
    degrees = [config.engine.degree(role) for role in config.cluster.roles]
    wanted = [threads * degree.num_processes for degree in degrees]
    shares = share_cores(read_cores(), wanted, usable_cores())
    if shares:
        log.info("engines on cores %s", ", ".join(format_cores(s.engine) for s in shares))
    return shares
