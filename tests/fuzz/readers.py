"""Lists the readers of bytes from outside, each with valid samples and the errors that it
documents."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch

from moonpool.api.connection.kept_stream import draw_facts
from moonpool.api.errors import ApiError
from moonpool.api.keys import KeyFileError, collect_keys
from moonpool.api.resume.event_ids import EventPosition, last_event_id
from moonpool.config.parse import parse_config
from moonpool.config.tables import ConfigError
from moonpool.discovery.dns_names import parse_srv
from moonpool.discovery.endpoint import SourceError
from moonpool.discovery.endpoints_file import parse_endpoints
from moonpool.discovery.ray_servers import read_object, read_replicas, read_rows
from moonpool.host_pool.messages import TO_POOL, Commit, Find, JoinPool, PoolMessage, Reserve
from moonpool.link.auth import AuthError, ClientHandshake, Identity, ServerHandshake
from moonpool.protocol.frames import DownFrame, UpFrame
from moonpool.sim.hardware.catalogue import package_text, parse_catalogue
from moonpool.text.model_error import ModelError
from moonpool.text.tokenizer import TokenizerError
from moonpool.trace.builtin import CONVERSATION, TOOLAGENT
from moonpool.trace.profile import read_profile
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceError
from moonpool.types import MALFORMED, InstanceId
from moonpool.vllm.events import read_batch
from moonpool_engine.attention_offload import wire as attention_wire
from moonpool_engine.engine.builtin import export_checkpoint, open_model
from moonpool_engine.engine.checkpoint import open_checkpoint
from moonpool_engine.engine.families.config import parse_config as parse_model_config
from moonpool_engine.engine.families.registry import FAMILIES
from moonpool_engine.engine.gguf.checkpoint import open_gguf
from moonpool_engine.engine.gguf.tokenizer import GgufVocabulary, gguf_tokenizer
from moonpool_engine.engine.quantized.checkpoints import read_scheme
from moonpool_engine.storage.folder import StoreError
from moonpool_engine.storage.format import (
    HELD,
    FormatError,
    Record,
    SlotHeader,
    checksum,
    decode_header,
    decode_index_head,
    decode_records,
    encode_header,
    encode_index_head,
    encode_records,
    make_geometry,
)
from moonpool_engine.storage.verify import verify_folder
from moonpool_engine.transfer.wire import Codec, Message, unpack_offers
from tests.fuzz.http_surface import ask, http_samples
from tests.fuzz.message_samples import samples_of
from tests.fuzz.model_files import (
    checkpoint_samples,
    gguf_samples,
    read_gguf_metadata,
    read_model_files,
    use_spec,
)
from tests.fuzz.trace_samples import AGENTS, LOGS, TRACES
from tests.unit.engine.gguf_files import tiny_llama
from tests.unit.engine.test_quantized_checkpoints import CASES
from tests.unit.storage.store_harness import key_of, make_layout

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = "random:hidden=16,layers=1,heads=1,kv_heads=1,inter=16,vocab=300,context=32"
CONFIG_JSON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": [1, 2],
    "tie_word_embeddings": True,
}
QUANTIZATION = "quantization_config"
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
)
CONFIG_TOML = b"""[cluster]
prefill = 0
decode = 0
mixed = 1
[pool]
block_tokens = 64
eviction = "lru"
[slo]
ttft_s = 30.0
[api]
api_keys = ["abc", "def"]
[vllm]
mixed = ["http://127.0.0.1:8100,tcp://127.0.0.1:5557"]
"""
RAY_ROWS = (
    b'{"result": true, "msg": "", "data": {"result": {"total": 1, "num_after_truncation": 1,'
    b' "num_filtered": 1, "result": [{"name": "vllm-0", "node_id": "n", "state": "ALIVE"}]}}}'
)
RAY_SERVE = (
    b'{"controller_info": {"node_ip": "h"}, "applications": {"app": {"status": "RUNNING"}},'
    b' "target_groups": [{"app_name": "app", "protocol": "HTTP", "targets": [{"ip": "10.0.0.1",'
    b' "port": 30000, "name": "SERVE_REPLICA::app#LLM#r"}]}]}'
)
ENDPOINTS = b"""endpoints:
  - {name: a, address: 10.0.0.1, port: "8000", labels: {llm-d.ai/role: decode}}
  - name: b
    address: fd00::1
    port: 8001
"""
SRV = bytes.fromhex(  # an answer with two records of "_a._tcp", after the question
    "123481800001000200000000025f61045f7463700000210001c00c0021000100"
    "0000010009000000001f40016100c00c00210001000000010009000000001f41"
    "016200"
)
KEYS = b"# key tenant share\nsk-abc123 acme 2.5\nsk-def456 other\nsk-0\n"


@dataclass(frozen=True, slots=True)
class Reader:
    """`read` must return a value or raise one of `errors`, whatever its input."""

    name: str
    samples: Callable[[], list[bytes]]
    read: Callable[[bytes, Path], object]
    """Takes (input, a folder for files)."""
    errors: tuple[type[Exception], ...]
    by_field: bool = False  # whether samples are JSON, of which mutations change a field


def _message(name: str, kind: Any) -> Reader:
    decoder = msgspec.msgpack.Decoder(kind)
    return Reader(
        name,
        lambda: samples_of(kind, 1),
        lambda data, folder: decoder.decode(data),
        MALFORMED,
    )


# Frames and handshakes:


def _event_ids() -> list[bytes]:
    position = EventPosition.of(draw_facts("request-1", 100), "request-1", bytes(8))
    return [f"{position.prefix()}{rest}".encode() for rest in ("12+AAAAAAAA", "0+.7+abcdefgh")]


def _identity(name: str) -> Identity:
    return Identity(instance_id=InstanceId(name), service="control", fingerprint=bytes(32))


def _handshake_samples() -> list[bytes]:
    client = ClientHandshake(b"s", _identity("c"))
    server = ServerHandshake(b"s", _identity("s"))
    hello = client.start()
    greeting = server.feed(hello)
    proof = client.feed(greeting)
    return [hello, greeting, proof, server.feed(proof)]


def _handshakes(data: bytes, folder: Path) -> None:
    """Gives the bytes to both sides, at the beginning and in the middle of a handshake."""
    for begun in (False, True):
        server = ServerHandshake(b"s", _identity("s"))
        client = ClientHandshake(b"s", _identity("c"))
        hello = client.start()
        if begun:
            server.feed(hello)
        for side in (server, client):
            try:
                side.feed(data)
            except AuthError:
                continue
            assert not side.done, "a handshake ended without the secret"


# The SSD's folder:

GEOMETRY = make_geometry(make_layout(), 1 << 15)
RECORDS = [Record(HELD, slot, slot + 1, key_of(slot)) for slot in range(4)]


def _slot_samples() -> list[bytes]:
    return [encode_header(SlotHeader(GEOMETRY, key_of(1), 1, 5, (1, 2, 3)))[:256]]


def _index_samples() -> list[bytes]:
    return [encode_index_head(GEOMETRY) + encode_records(RECORDS)]


def _read_index(data: bytes, folder: Path) -> None:
    list(decode_records(data))
    decode_index_head(data)


def _read_slot(data: bytes, folder: Path) -> None:
    """Reads the input as it is, and with a right checksum, which an attacker could compute."""
    for each in (data, _resealed(data)):
        try:
            decode_header(each)
        except FormatError:
            continue


def _resealed(data: bytes) -> bytes:
    end = struct.calcsize("<8sIIQII32s16sQQ") + 3 * 8
    return data[:end] + struct.pack("<Q", checksum(data[:end])) + data[end + 8 :]


def _read_folder(data: bytes, folder: Path) -> None:
    """The first two bytes say where the input is cut into index and segment."""
    cut = int.from_bytes(data[:2], "little") % (len(data) + 1)
    (folder / "index").write_bytes(data[2:cut])
    (folder / "segment-000000").write_bytes(data[cut:])
    verify_folder(folder)


def _folder_samples() -> list[bytes]:
    index = _index_samples()[0]
    slots = b"".join(
        encode_header(SlotHeader(GEOMETRY, key_of(n), n, n + 1, (1, 2, 3)))
        + bytes(GEOMETRY.slot_bytes - GEOMETRY.header_bytes)
        for n in range(2)
    )
    return [struct.pack("<H", len(index) + 2) + index + slots]


# Files:


def _read_trace(data: bytes, folder: Path) -> None:
    (folder / "trace").write_bytes(data)
    list(open_trace(folder / "trace"))


def _read_profile(data: bytes, folder: Path) -> None:
    (folder / "profile.json").write_bytes(data)
    read_profile(folder / "profile.json")


def _read_text(parse: Callable[[str], object]) -> Callable[[bytes, Path], None]:
    """Commands refuse files that are not UTF-8 before they parse them."""

    def read(data: bytes, folder: Path) -> None:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = data.decode("latin-1")
        parse(text)

    return read


def _read_model_config(data: bytes, folder: Path) -> None:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(config, dict):
        read_scheme(config)
        use_spec(parse_model_config({k: v for k, v in config.items() if k != QUANTIZATION}))


def _model_configs() -> list[bytes]:
    """Makes one file of each family, with every field that is read."""
    configs = [CONFIG_JSON | {"rope_parameters": rope} for rope in ROPES]
    for family in FAMILIES.values():
        config = ALL_FIELDS | {"architectures": [family.architecture]}
        if family.attention_only:
            config |= {"layer_types": ["attention"] * 2, "num_local_experts": 0}
        if family.latent:
            config |= {"num_key_value_heads": 4}
        if family.activation == "gelu_tanh":
            config |= {"hidden_activation": "gelu_pytorch_tanh"}
        if family.partial_rope:
            config |= {"partial_rotary_factor": 0.5}
        configs.append(config)
        if family.inside:
            text = {"model_type": "x", "text_config": config}
            configs.append(text | {"architectures": [family.inside[0]], "eos_token_id": 3})
    longrope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi = {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5}
    configs.append(ALL_FIELDS | phi | {"rope_scaling": longrope})
    configs += [ALL_FIELDS | {"quantization_config": scheme} for _, scheme in CASES.values()]
    return [json.dumps(config).encode() for config in configs]


ALL_FIELDS: dict[str, Any] = CONFIG_JSON | {
    "model_type": "llama",
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_bias": False,
    "mlp_bias": False,
    "shared_intermediate_size": 64,
    "sliding_window": 40,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "no_rope_layers": [1, 0],
    "no_rope_layer_interval": 4,
    "bos_token_id": 1,
    "num_nextn_predict_layers": 0,
    "original_max_position_embeddings": 512,
    "query_pre_attn_scalar": 16,
    "attention_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attn_logit_softcapping": 30.0,
    "final_logit_softcapping": 30.0,
    "swiglu_alpha": 1.7,
    "swiglu_limit": 7.0,
    "kv_lora_rank": 48,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 20,
    "v_head_dim": 24,
    "rope_interleave": True,
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "moe_layer_freq": 1,
    "use_qk_norm": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "attn_output_gate": True,
    "position_embedding_type": "rope",
    "rope_local_base_freq": 10000.0,
}


def _checkpoint_samples() -> list[bytes]:
    """Holds config.json's length, config.json, and the tensors."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        export_checkpoint(open_model(TINY, "float32"), Path(name))
        config = (Path(name) / "config.json").read_bytes()
        tensors = (Path(name) / "model.safetensors").read_bytes()
    return [struct.pack("<H", len(config)) + config + tensors]


def _read_checkpoint(data: bytes, folder: Path) -> None:
    end = 2 + int.from_bytes(data[:2], "little")
    (folder / "config.json").write_bytes(data[2:end])
    (folder / "model.safetensors").write_bytes(data[end:])
    opened = open_checkpoint(str(folder), torch.float32)
    opened.weights.load("model.norm.weight")


def _gguf_samples() -> list[bytes]:
    return [tiny_llama({"": "Q8_0"}).content()]


def _read_gguf(data: bytes, folder: Path) -> None:
    path = folder / "model.gguf"
    path.write_bytes(data)
    open_gguf(path, torch.float32)
    tokenizer, vocabulary = gguf_tokenizer(path), GgufVocabulary(path)
    assert all(
        vocabulary.token_bytes(number) == tokenizer.token_bytes(number)
        for number in range(tokenizer.vocab_size)
    )


def _gguf_part_samples() -> list[bytes]:
    parts = [draft.content() for draft in tiny_llama({"": "Q8_0"}).parts(3)]
    return [struct.pack("<II", len(parts[0]), len(parts[1])) + b"".join(parts)]


def _read_gguf_parts(data: bytes, folder: Path) -> None:
    one, two = struct.unpack("<II", data[:8].ljust(8, b"\0"))
    bounds = [8, 8 + one, 8 + one + two, len(data)]
    for number, (begin, end) in enumerate(pairwise(bounds), 1):
        (folder / f"m-{number:05}-of-00003.gguf").write_bytes(data[begin:end])
    path = folder / "m-00001-of-00003.gguf"
    open_gguf(path, torch.float32)
    gguf_tokenizer(path)


def _event_samples() -> list[bytes]:
    golden = json.loads((GOLDEN / "vllm_events.json").read_text())
    old = [["BlockStored", [b"h1", 7], None, [1, 2, 3, 4], 2, None], ["BlockRemoved", [b"h1"]]]
    batches = [bytes.fromhex(text) for text in golden["batches"]]
    return [*batches, msgspec.msgpack.encode([1.0, old])]


def _profiles() -> list[bytes]:
    return [msgspec.json.encode(profile) for profile in (CONVERSATION, TOOLAGENT)]


def _pool_requests() -> list[bytes]:
    keys = (bytes(16), bytes(range(16)))
    found = (
        JoinPool(protocol=1),
        Find(owner="o", group=bytes(32), keys=keys, wait_s=1.0),
        Reserve(number=1, keys=keys, first_depth=2),
        Commit(number=1, checksums=bytes(16)),
    )
    return [msgspec.msgpack.encode(one) for one in found]


READERS = (
    _message("control-up", UpFrame),
    _message("control-down", DownFrame),
    _message("attention-opening", attention_wire.Opening),
    _message("attention-command", attention_wire.AttentionCommand),
    _message("attention-event", attention_wire.AttentionEvent),
    Reader("pool-client", _pool_requests, lambda data, folder: TO_POOL.decode(data), MALFORMED),
    _message("pool-server", PoolMessage),
    Reader(
        "transfer",
        lambda: samples_of(Message, 1),
        lambda data, folder: Codec().decode(data),
        MALFORMED,
    ),
    Reader(
        "transfer-offers",
        lambda: [bytes(range(64)) * 3],
        lambda data, folder: unpack_offers(data),
        (struct.error,),
    ),
    Reader("handshake", _handshake_samples, _handshakes, ()),
    Reader(
        "event-id",
        _event_ids,
        lambda data, folder: last_event_id({b"last-event-id": data}),
        (ApiError,),
    ),
    Reader("ssd-slot", _slot_samples, _read_slot, ()),
    Reader("ssd-index", _index_samples, _read_index, (FormatError,)),
    Reader("ssd-folder", _folder_samples, _read_folder, (StoreError,)),
    Reader("trace", lambda: [*TRACES, *AGENTS], _read_trace, (TraceError,)),
    Reader("trace-log", lambda: list(LOGS), _read_trace, (TraceError,)),
    Reader("trace-profile", _profiles, _read_profile, (TraceError,)),
    Reader("config", lambda: [CONFIG_TOML], _read_text(parse_config), (ConfigError,)),
    Reader(
        "catalogue",
        lambda: [package_text("catalogue.toml").partition("\n[devices.A800-SXM]")[0].encode()],
        _read_text(parse_catalogue),
        (ConfigError,),
    ),
    Reader(
        "keys",
        lambda: [KEYS],
        _read_text(lambda text: collect_keys((), text, "")),
        (KeyFileError,),
    ),
    Reader("endpoints", lambda: [ENDPOINTS], lambda d, folder: parse_endpoints(d), (SourceError,)),
    Reader("ray rows", lambda: [RAY_ROWS], lambda d, folder: read_rows(d), (SourceError,)),
    Reader(
        "ray serve",
        lambda: [RAY_SERVE],
        lambda d, folder: read_replicas(read_object(d), "app"),
        (SourceError,),
    ),
    Reader("srv-records", lambda: [SRV], lambda d, folder: parse_srv(SRV[:25], d), (SourceError,)),
    Reader("model-config", _model_configs, _read_model_config, (ModelError,)),
    Reader("model-fields", _model_configs, _read_model_config, (ModelError,), by_field=True),
    Reader(
        "model-files",
        checkpoint_samples,
        read_model_files,
        (ModelError, TokenizerError),
        by_field=True,
    ),
    Reader(
        "gguf-keys",
        gguf_samples,
        read_gguf_metadata,
        (ModelError, TokenizerError),
        by_field=True,
    ),
    Reader("checkpoint", _checkpoint_samples, _read_checkpoint, (ModelError,)),
    Reader("gguf", _gguf_samples, _read_gguf, (ModelError, TokenizerError)),
    Reader("gguf-parts", _gguf_part_samples, _read_gguf_parts, (ModelError, TokenizerError)),
    Reader("http", http_samples, ask, ()),
    Reader("vllm-events", _event_samples, lambda data, folder: read_batch(data), (ValueError,)),
)
