"""One frozen table per part of the system, read from TOML; flags override single values.

Nothing here touches a disk: the edges read the file and hand over its text.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from moonpool.types import Role, Struct

Placement = Literal["random", "load-balancing", "cache-aware", "kvcache-centric"]
Admission = Literal["none", "baseline", "early", "predictive"]
EvictionName = Literal["lru", "lfu", "length-aware", "predictive"]
SsdAdmission = Literal["second-use", "always"]
Batching = Literal["chunked", "fixed-chunks", "prefill-first", "whole-prompts", "alternating"]
DecodePrediction = Literal["duration", "length"]
RoleBalance = Literal["off", "advise", "switch"]
Parallelism = Literal["tp", "tp+sp", "pp", "cpp"]
MooncakeProtocol = Literal["tcp", "rdma"]
Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["cpu", "cuda", "auto"]
Quantization = Literal["none", "int8"]
Pinning = Literal["on", "off"]
AttentionPartition = Literal["request", "head", "tokens"]
EngineKind = Literal["moonpool", "vllm"]


_WEB = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/[\w./-]*)?", re.ASCII)

ATTENTION_SEGMENT_TOKENS = 2048
"""After so many attention begins anew: a request's segments may lie at several workers."""


class ConfigError(ValueError):
    """The configuration cannot be used; the text says what is wrong and what to do."""


class ModelConfig(Struct, frozen=True):
    name: str = "moonpool/induction"
    dtype: Dtype = "auto"
    quantization: Quantization = "none"  # of the weights, as they are loaded
    served_name: str = ""  # "": the name itself
    max_model_tokens: int = 0  # prompt and answer; 0: as far as model and pool reach


class ClusterConfig(Struct, frozen=True):
    """How many instances of each role to start on this machine."""

    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    attention: int = 0  # workers that keep the KVCache of those that decode, shared out evenly

    @property
    def num_workers(self) -> int:
        """Processes of them all."""
        return self.prefill + self.decode + self.mixed + self.attention

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of every instance, in the order in which they are started."""
        counts = ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        return tuple(role for role, n in (*counts, (Role.MIXED, self.mixed)) for _ in range(n))

    @property
    def attention_owners(self) -> int:
        """Instances among which attention workers are shared out: those that decode."""
        return self.decode + self.mixed

    def num_processes(self, engine: EngineConfig) -> int:
        """All stages and ranks of all instances, and attention workers; at least 1."""
        instances = sum(engine.degree(role).num_processes for role in self.roles)
        return max(instances + self.attention, 1)


class AttentionConfig(Struct, frozen=True):
    """What each of an instance's attention workers keeps. "request": whole requests; "head": its
    share of the kv heads of all of them (Lamina's); "tokens": whole requests as long as they are
    short, and segments of long ones. The instance itself keeps, and attends to, `own_tokens`."""

    partition: AttentionPartition = "request"
    own_tokens: int = 0  # 0: it keeps weights alone, and loses no KVCache with its process


class PoolConfig(Struct, frozen=True):
    """The KVCache pool. `dram_tokens_per_instance == 0`: as much as a quarter of the machine's free
    memory, divided among its instances, up to 262,144 tokens each. `ssd_tokens_per_instance == 0`:
    no SSD tier. `ssd_admission`: which blocks are written to it when they leave DRAM."""

    block_tokens: int = 64
    dram_tokens_per_instance: int = 0
    prefix_caching: bool = True
    eviction: EvictionName = "lru"
    ssd_tokens_per_instance: int = 0
    ssd_admission: SsdAdmission = "always"
    ssd_folder: str = ""  # each live instance keeps its blocks in a folder of its own below it


class MooncakeConfig(Struct, frozen=True):
    """A Mooncake Store that keeps, in the SSD's place, what instances compute; the keys are those
    of Mooncake's own configuration. No address: no such store."""

    master_server_address: str = ""  # HOST:PORT
    metadata_server: str = "P2PHANDSHAKE"
    protocol: MooncakeProtocol = "tcp"
    device_name: str = ""
    global_segment_size: int = 0  # bytes of memory that each instance lends to the store


class NetworkConfig(Struct, frozen=True):
    """Where the head listens for workers, and how they exchange blocks. A worker listens for its
    peers at the address by which it reaches the head, unless it is told another."""

    head_host: str = "127.0.0.1"
    head_port: int = 0  # 0: any free one
    use_shared_memory: bool = True
    nixl: bool = False  # RDMA, or what else UCX finds, between machines that have it


class SloConfig(Struct, frozen=True):
    ttft_s: float = 30.0
    tbt_s: float = 0.5


class ConductorConfig(Struct, frozen=True):
    placement: Placement = "kvcache-centric"
    admission: Admission = "early"
    kvcache_balancing_threshold: float = 1.0
    max_attempts: int = 3
    load_limit: float = 1.0  # of predicted over promised latency, above which requests are refused
    decode_prediction: DecodePrediction = "duration"
    inline_prefill: bool = True  # short prompts run in a decode batch, if its TBT SLO holds
    spare_copies_first: bool = True  # of a block in several DRAMs, one keeps it
    learning: bool = True  # instances' times are believed as they are seen, not as profiled
    seed: int = 0  # of the random placement
    role_balance: RoleBalance = "off"  # say that the P:D ratio does not fit the load, or change it
    role_balance_window_s: float = 300.0  # of the load that it goes by


class InstanceConfig(Struct, frozen=True):
    """What an instance's state machine needs to know."""

    chunk_tokens: int = 512
    max_sequences: int = 128
    prefix_caching: bool = True
    eviction: EvictionName = "lru"
    batching: Batching = "chunked"
    max_steps_in_flight: int = 1  # more than one: stages of a pipeline
    micro_batches: int = 1  # decodes are divided evenly among so many steps: one a stage
    engine_tokens: int = 0  # of KVCache that the engine's own memory holds; 0: all of the pool
    tbt_slo_s: float = float("inf")  # of works that were promised nothing themselves
    layer_wise_load: bool = False  # a prefill may compute while its prefix still arrives
    max_repeats: int = 1  # steps of decodes alone that may run without a word between them
    ssd_blocks: int = 0  # that the SSD has slots for; 0: there is no such tier
    ssd_admission: SsdAdmission = "always"
    store_shared: bool = False  # in the SSD's place, a store that other instances use too
    learning: bool = True  # its own check believes steps as they are seen, not as profiled


class Degree(Struct, frozen=True):
    """The processes of one instance: stages in a row, or ranks side by side."""

    num_stages: int = 1
    num_ranks: int = 1

    @property
    def num_processes(self) -> int:
        return self.num_stages * self.num_ranks


class EngineConfig(Struct, frozen=True):
    """`kind`: whose engines the instances are; "vllm": ones that run already, and each instance
    only stands before one (see `VllmConfig`). `device`: what computes. On "cuda", weights and
    KVCache are in the memory of the first GPU that a worker sees, those of its stages on one GPU
    after the other; the arena, which the messenger moves, stays in the host's. "auto" is "cuda" if
    the head sees a GPU.
    `pipeline_parallel_size`: stages of a prefill or mixed instance, each a process (in a simulation
    a node) with a share of the layers. `tensor_parallel_size`: ranks of one, each with a share of
    every layer."""

    kind: EngineKind = "moonpool"
    chunk_tokens: int = 512
    max_sequences: int = 128
    batching: Batching = "chunked"
    threads: int = 0  # per process; 0: cores / processes, at least 1
    pinning: Pinning = "on"  # engines to cores of their own, where there are enough
    device: Device = "cpu"
    staggered_decodes: bool = False  # as two halves that take turns, with attention workers
    pipeline_parallel_size: int = 1
    decode_pipeline_parallel_size: int = 1  # of a decode instance

    tensor_parallel_size: int = 1
    decode_tensor_parallel_size: int = 1  # of a decode instance

    def degree(self, role: Role) -> Degree:
        if role is Role.DECODE:
            return Degree(self.decode_pipeline_parallel_size, self.decode_tensor_parallel_size)
        return Degree(self.pipeline_parallel_size, self.tensor_parallel_size)

    @property
    def num_shards(self) -> int:
        """In which all instances compute, whatever their ranks, so that they exchange blocks."""
        return max(self.tensor_parallel_size, self.decode_tensor_parallel_size)


class VllmPlace(Struct, frozen=True):
    """A vLLM: where its HTTP server listens; where it publishes the KV events of its prefix cache,
    and repeats them, "" if nowhere."""

    url: str
    events: str = ""
    replay: str = ""


class VllmConfig(Struct, frozen=True):
    """The vLLMs that serve as instances, by role, each as "URL", "URL,EVENTS" or
    "URL,EVENTS,REPLAY" (see `vllm_place`)."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()


class HardwareConfig(Struct, frozen=True):
    """What a simulated instance runs on. `cost` is the truth of the simulation: a calibrated model
    of the catalogue, "roofline" (of `device` and `shape`), or the file of a measured profile.
    `nodes_per_prefill` nodes form one prefill (or mixed) instance, joined by `parallelism`. Decode
    instances may run on nodes of another kind, and keep their KVCache and its attention on
    `attention_devices_per_node` devices more (Lamina); their own devices then hold weights alone,
    and serve `decode_batches` staggered batches on one replica fewer."""

    cost: str = "a800-llama3-70b"
    device: str = "A800-SXM"
    shape: str = "llama3-70b"
    devices_per_node: int = 8
    nodes_per_prefill: int = 1
    parallelism: Parallelism = "tp"
    ssd_read_bytes_per_s: float = 0.0  # of one node; 0: as `cost.node` assumes
    ssd_write_bytes_per_s: float = 0.0
    decode_device: str = ""  # "": as `device`
    decode_devices_per_node: int = 0  # 0: as `devices_per_node`
    attention_device: str = ""  # of decode instances; "": their own devices attend
    attention_devices_per_node: int = 0
    decode_batches: int = 2


class ApiConfig(Struct, frozen=True):
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    request_timeout_s: float = 600.0


class Config(Struct, frozen=True):
    model: ModelConfig = ModelConfig()
    cluster: ClusterConfig = ClusterConfig()
    attention: AttentionConfig = AttentionConfig()
    pool: PoolConfig = PoolConfig()
    mooncake: MooncakeConfig = MooncakeConfig()
    network: NetworkConfig = NetworkConfig()
    slo: SloConfig = SloConfig()
    conductor: ConductorConfig = ConductorConfig()
    engine: EngineConfig = EngineConfig()
    vllm: VllmConfig = VllmConfig()
    hardware: HardwareConfig = HardwareConfig()
    api: ApiConfig = ApiConfig()


def parse_config(
    text: str,
    overrides: dict[str, dict[str, Any]] | None = None,
    defaults: dict[str, dict[str, Any]] | None = None,
) -> Config:
    """Reads TOML text, lays `overrides` (table -> key -> value) over it, and checks the result.
    What neither names is as in `defaults`, then as in the tables above.

    Raises ConfigError: bad TOML, unknown table or key (naming the nearest known one), wrong type,
    value out of range.
    """
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the config is not valid TOML: {error}") from None
    _check_names(tables)
    for table, values in (overrides or {}).items():
        tables.setdefault(table, {}).update(values)
    _check_names(tables)
    for table, values in (defaults or {}).items():
        tables[table] = values | tables.get(table, {})
    _count_vllms(tables)
    try:
        config = msgspec.convert(tables, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the config has a bad value: {error}") from None
    check_values(config)
    return config


def vllm_place(text: str) -> VllmPlace:
    """From "URL", "URL,EVENTS" or "URL,EVENTS,REPLAY". Raises ConfigError."""
    url, *others = text.split(",")
    web = _WEB.fullmatch(url)
    if (
        not web
        or int((web[2] or ":0")[1:]) > 65535
        or len(others) > 2
        or not all(o.startswith(("tcp://", "ipc://")) for o in others)
    ):
        raise ConfigError(
            f"{text!r} names no vLLM: use its URL, such as http://127.0.0.1:8100, and after a comma"
            " where it publishes KV events and repeats them, such as"
            " http://127.0.0.1:8100,tcp://127.0.0.1:5557,tcp://127.0.0.1:5558"
        )
    return VllmPlace(**dict(zip(("url", "events", "replay"), (url, *others), strict=False)))


def _count_vllms(tables: dict[str, Any]) -> None:
    """Where vLLMs are named, the instances are as many as these (mutates)."""
    named = tables.get("vllm")
    if not isinstance(named, dict) or not any(named.values()):
        return
    tables.setdefault("engine", {}).setdefault("kind", "vllm")
    counts = tables.setdefault("cluster", {})
    for role in ("prefill", "decode", "mixed"):
        places = named.get(role, ())
        if isinstance(places, list | tuple):
            counts.setdefault(role, len(places))


def _check_names(tables: dict[str, Any]) -> None:
    hints = get_type_hints(Config)
    for table, values in tables.items():
        if table not in hints:
            raise ConfigError(f"unknown table [{table}]{_nearest(table, hints)}")
        if not isinstance(values, dict):
            raise ConfigError(f"[{table}] must be a table, not {type(values).__name__}")
        known = hints[table].__struct_fields__
        for key in values:
            if key not in known:
                raise ConfigError(f"unknown key {table}.{key}{_nearest(key, known)}")


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(known)}"


def check_values(config: Config) -> None:
    """Raises ConfigError for a value out of range, or that does not go with another."""
    cluster = config.cluster
    _require(min(cluster.prefill, cluster.decode, cluster.mixed) >= 0, "cluster", ">= 0")
    _require(
        bool(cluster.mixed or (cluster.prefill and cluster.decode)),
        "cluster",
        "at least one prefill and one decode instance, or one mixed one",
    )
    _require(
        bool(cluster.prefill) == bool(cluster.decode) or bool(cluster.mixed),
        "cluster",
        "both prefill and decode instances",
    )
    _require(cluster.prefill + cluster.decode + cluster.mixed <= 65536, "cluster", "<= 65536")
    _check_attention_workers(config)
    tokens = config.pool.block_tokens
    _require(
        tokens > 0 and tokens % 16 == 0 and tokens <= 1024,
        "pool.block_tokens",
        "a multiple of 16, at most 1024",
    )
    _require(config.pool.dram_tokens_per_instance >= 0, "pool.dram_tokens_per_instance", ">= 0")
    _require(config.pool.ssd_tokens_per_instance >= 0, "pool.ssd_tokens_per_instance", ">= 0")
    _check_mooncake(config)
    _require(config.model.max_model_tokens >= 0, "model.max_model_tokens", ">= 0")
    _require(config.slo.ttft_s > 0 and config.slo.tbt_s > 0, "slo", "> 0 seconds")
    _require(config.engine.chunk_tokens >= 1, "engine.chunk_tokens", ">= 1")
    _require(config.engine.max_sequences >= 1, "engine.max_sequences", ">= 1")
    _require(0 <= config.engine.threads <= 1024, "engine.threads", "0 to 1024")
    _require(0 <= config.api.port <= 65535, "api.port", "0 to 65535")
    _require(0 <= config.network.head_port <= 65535, "network.head_port", "0 to 65535")
    _require(config.api.max_body_bytes > 0, "api.max_body_bytes", "> 0")
    timeout_s = config.api.request_timeout_s
    _require(0 < timeout_s <= 86_400, "api.request_timeout_s", "> 0 and at most a day (86400)")
    _require(
        config.conductor.kvcache_balancing_threshold >= 1,
        "conductor.kvcache_balancing_threshold",
        ">= 1",
    )
    _require(config.conductor.load_limit > 0, "conductor.load_limit", "> 0")
    _require(
        1.0 <= config.conductor.role_balance_window_s <= 86_400,
        "conductor.role_balance_window_s",
        "1 to 86400 seconds",
    )
    hardware = config.hardware
    _require(1 <= hardware.devices_per_node <= 64, "hardware.devices_per_node", "1 to 64")
    for name in ("ssd_read_bytes_per_s", "ssd_write_bytes_per_s"):
        _require(0 <= getattr(hardware, name) < float("inf"), f"hardware.{name}", ">= 0")
    _require(1 <= hardware.nodes_per_prefill <= 64, "hardware.nodes_per_prefill", "1 to 64")
    _require(
        config.conductor.role_balance != "switch" or hardware.nodes_per_prefill == 1,
        "conductor.role_balance",
        '"off" or "advise" while hardware.nodes_per_prefill is above 1: a group of nodes cannot'
        " become a decode instance",
    )
    number = hardware.decode_devices_per_node
    _require(0 <= number <= 64, "hardware.decode_devices_per_node", "0 to 64 (0: as the others)")
    _check_attention(config)
    _check_stages(config)
    _check_vllm(config)
    _require(1 <= config.conductor.max_attempts <= 10, "conductor.max_attempts", "1 to 10")


def _check_vllm(config: Config) -> None:
    cluster = config.cluster
    named = {name: getattr(config.vllm, name) for name in ("prefill", "decode", "mixed")}
    for place in (place for places in named.values() for place in places):
        vllm_place(place)
    if config.engine.kind != "vllm":
        _require(not any(named.values()), "engine.kind", '"vllm" where [vllm] names any')
        return
    for role, places in named.items():
        number = getattr(cluster, role)
        _require(
            not any(named.values()) or number == len(places),
            f"cluster.{role}",
            f"{len(places)}, as many as [vllm] names: an instance is a vLLM, or all are moonpool's",
        )
    _require(not cluster.attention, "cluster.attention", '0 with engine.kind "vllm"')
    _require(
        config.conductor.role_balance != "switch",
        "conductor.role_balance",
        '"off" or "advise" with engine.kind "vllm": a vLLM stays what it was started as',
    )


def _check_stages(config: Config) -> None:
    engine = config.engine
    for name in ("pipeline_parallel_size", "decode_pipeline_parallel_size"):
        _require(1 <= getattr(engine, name) <= 64, f"engine.{name}", "1 to 64")
    _require(
        config.hardware.nodes_per_prefill == 1 or engine.pipeline_parallel_size == 1,
        "hardware.nodes_per_prefill",
        "1 where engine.pipeline_parallel_size is above 1: each stage is a node",
    )
    _check_ranks(config)


def _check_ranks(config: Config) -> None:
    engine = config.engine
    for name in ("tensor_parallel_size", "decode_tensor_parallel_size"):
        _require(getattr(engine, name) in (1, 2, 4, 8, 16), f"engine.{name}", "1, 2, 4, 8 or 16")
    if engine.num_shards == 1:
        return
    name = "engine.tensor_parallel_size"
    if engine.tensor_parallel_size == 1:
        name = "engine.decode_tensor_parallel_size"
    pipelines = max(engine.pipeline_parallel_size, engine.decode_pipeline_parallel_size)
    _require(pipelines == 1, name, "1 where instances have stages (pipeline_parallel_size)")
    _require(engine.device != "cuda", name, '1 while engine.device is "cuda": ranks are of CPUs')
    _require(not config.cluster.attention, name, "1 with attention workers (cluster.attention)")
    _require(
        config.hardware.nodes_per_prefill == 1,
        "hardware.nodes_per_prefill",
        f"1 where {name} is above 1: each rank is a node",
    )
    _require(
        not config.hardware.attention_device,
        name,
        "1 with hardware.attention_device: decodes attend on other devices",
    )


def _check_attention(config: Config) -> None:
    hardware = config.hardware
    number, named = hardware.attention_devices_per_node, bool(hardware.attention_device)
    _require(
        0 <= number <= 64 and bool(number) == named,
        "hardware.attention_devices_per_node",
        "1 to 64 where hardware.attention_device names one, and 0 where it does not",
    )
    _require(1 <= hardware.decode_batches <= 8, "hardware.decode_batches", "1 to 8")
    _require(
        not named or config.engine.decode_pipeline_parallel_size == 1,
        "engine.decode_pipeline_parallel_size",
        "1 with hardware.attention_device: decodes attend on other devices",
    )
    _require(
        not named or config.conductor.role_balance != "switch",
        "conductor.role_balance",
        '"off" or "advise" with hardware.attention_device: the devices that attend cannot prefill',
    )


def _check_mooncake(config: Config) -> None:
    mooncake = config.mooncake
    host, _, port = mooncake.master_server_address.rpartition(":")
    _require(
        not mooncake.master_server_address or bool(host and port.isdigit()),
        "mooncake.master_server_address",
        "HOST:PORT of a mooncake_master",
    )
    _require(
        not (mooncake.master_server_address and config.pool.ssd_tokens_per_instance),
        "mooncake.master_server_address",
        '"" where pool.ssd_tokens_per_instance is above 0: an instance has an SSD or a store',
    )
    _require(mooncake.global_segment_size >= 0, "mooncake.global_segment_size", ">= 0")


def _check_attention_workers(config: Config) -> None:
    cluster, partition = config.cluster, config.attention.partition
    own_tokens = config.attention.own_tokens
    _require(cluster.attention >= 0, "cluster.attention", ">= 0")
    _require(own_tokens >= 0, "attention.own_tokens", ">= 0")
    _require(
        not own_tokens or partition != "head",
        "attention.own_tokens",
        '0 with attention.partition "head": all blocks are at all workers',
    )
    _require(
        partition != "tokens" or ATTENTION_SEGMENT_TOKENS % config.pool.block_tokens == 0,
        "pool.block_tokens",
        f'a power of two with attention.partition "tokens": blocks must fill segments of'
        f" {ATTENTION_SEGMENT_TOKENS} tokens",
    )
    if not cluster.attention:
        _require(partition == "request", "cluster.attention", "> 0 to choose attention.partition")
        _require(not own_tokens, "cluster.attention", "> 0 to set attention.own_tokens")
        _require(not config.engine.staggered_decodes, "cluster.attention", "> 0 to stagger decodes")
        return
    owners = cluster.attention_owners
    _require(
        cluster.attention % owners == 0,
        "cluster.attention",
        f"a multiple of the {owners} instances that decode, which share them out evenly",
    )
    _require(
        config.conductor.role_balance != "switch",
        "conductor.role_balance",
        '"off" or "advise" with attention workers: they serve instances that decode, always',
    )
    _require(
        config.engine.device == "cpu",
        "engine.device",
        '"cpu" with attention workers: they attend with the CPU\'s kernels',
    )
    _require(
        config.engine.decode_pipeline_parallel_size == 1
        and not (cluster.mixed and config.engine.pipeline_parallel_size > 1),
        "engine.decode_pipeline_parallel_size",
        "1 with attention workers (and pipeline_parallel_size of mixed instances): stages keep"
        " their own KVCache",
    )


def _require(holds: bool, name: str, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {wanted}")


def choices(alias: Any) -> tuple[str, ...]:
    """The allowed values of one of the Literal types above, for the command line's help."""
    return get_args(alias)
