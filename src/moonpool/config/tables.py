"""The configuration: one frozen table per part of the system, read from TOML text.

Command-line flags override single values. Callers read the file; this module is pure.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from msgspec import Meta
from msgspec.structs import replace

from moonpool.config.api import ApiConfig as ApiConfig
from moonpool.config.hardware import HardwareConfig as HardwareConfig
from moonpool.config.hardware import Parallelism as Parallelism
from moonpool.config.ray import RayConfig as RayConfig
from moonpool.config.schema import ConfigError as ConfigError
from moonpool.config.schema import about
from moonpool.config.schema import choices as choices
from moonpool.config.slo import SloConfig as SloConfig
from moonpool.config.vllm import VllmAddress as VllmAddress
from moonpool.config.vllm import VllmConfig as VllmConfig
from moonpool.types import Role, Struct


class TlsConfig(Struct, frozen=True):
    """Certificates of connections between machines. Workers have flags of the same names, because
    each machine has files of its own."""

    certfile: Annotated[
        str,
        about(
            "Encrypt connections between head, workers and peers; certificate of this machine"
            " (PEM).",
            "--cluster-ssl-certfile",
            metavar="FILE",
            protects=True,
        ),
    ] = ""
    keyfile: Annotated[
        str,
        about(
            "Key of that certificate (PEM); in the certificate's file unless given.",
            "--cluster-ssl-keyfile",
            metavar="FILE",
            protects=True,
        ),
    ] = ""
    ca_certs: Annotated[
        str,
        about(
            "Authority (PEM) that has signed the certificates of all parts, and of nothing else.",
            "--cluster-ssl-ca-certs",
            metavar="FILE",
            protects=True,
        ),
    ] = ""

    def flags(self) -> tuple[str, ...]:
        """Returns the same as flags of a worker on this machine."""
        given = {"certfile": self.certfile, "keyfile": self.keyfile, "ca-certs": self.ca_certs}
        pairs = [(f"--cluster-ssl-{name}", path) for name, path in given.items() if path]
        return tuple(word for pair in pairs for word in pair)


LogLevel = Literal["auto", "debug", "info", "warning", "error"]
LogFormat = Literal["auto", "text", "json"]
LOG_LEVELS: tuple[str, ...] = get_args(LogLevel)
LOG_FORMATS: tuple[str, ...] = get_args(LogFormat)


class TelemetryConfig(Struct, frozen=True):
    """What the cluster reports in addition to `/metrics`. Local workers take over the level and the
    format of the head's log lines."""

    log_level: Annotated[
        LogLevel,
        about("Least level of log lines; auto takes MOONPOOL_LOG_LEVEL of the environment."),
    ] = "auto"
    log_format: Annotated[
        LogFormat, about("Form of log lines; auto takes MOONPOOL_LOG_FORMAT of the environment.")
    ] = "auto"
    log_requests: Annotated[
        bool, about("Log one line for each ended request, with the time of each stage.")
    ] = False
    otlp_traces_endpoint: Annotated[
        str,
        about(
            "Send the spans of each request to this OpenTelemetry collector (OTLP over HTTP).",
            metavar="URL",
        ),
    ] = ""


Placement = Literal["random", "load-balancing", "cache-aware", "kvcache-centric"]
Admission = Literal["none", "baseline", "early", "predictive", "goodput"]
EvictionName = Literal["lru", "lfu", "length-aware", "predictive"]
PolicyName = str
"""A built-in policy, or "module:Class" from outside the package (docs/extending.md)."""
SsdAdmission = Literal["second-use", "always"]
Batching = Literal["chunked", "fixed-chunks", "prefill-first", "whole-prompts", "alternating"]
DecodePrediction = Literal["duration", "length"]
RoleBalance = Literal["off", "advise", "switch"]
ProgramRules = Literal["off", "named", "all"]
MooncakeProtocol = Literal["tcp", "rdma"]
Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["cpu", "cuda", "auto"]
Quantization = Literal["none", "int8", "int4", "fp8"]
KvCacheDtype = Literal["auto", "fp8"]
Pinning = Literal["on", "off"]
AttentionPartition = Literal["request", "head", "tokens"]
EngineKind = Literal["moonpool", "vllm"]
Launcher = Literal["local", "ray"]
SpeculativeMethod = Literal["ngram", "draft_model"]
PLACEMENTS: tuple[str, ...] = get_args(Placement)
ADMISSIONS: tuple[str, ...] = get_args(Admission)
EVICTIONS: tuple[str, ...] = get_args(EvictionName)
POLICY_KEYS = (("conductor", "placement"), ("conductor", "admission"), ("pool", "eviction"))
"""The keys that take a `PolicyName`."""


_OWN_POLICY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")

ATTENTION_SEGMENT_TOKENS = 2048
"""Number of tokens in a segment. The segments of one request may lie at several attention
workers."""


class ModelConfig(Struct, frozen=True):
    """An empty `name` means, in front of vLLM servers, all models that these serve."""

    name: Annotated[str, about("The model: a Hugging Face folder or id, or a built-in.")] = (
        "moonpool/induction"
    )
    dtype: Annotated[
        Dtype,
        about(
            "Number format of weights and KVCache; auto takes bfloat16 where the CPU or GPU has it,"
            " else float32."
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization, about("Quantize the weights while they are loaded; fp8 is simulated only.")
    ] = "none"
    kv_cache_dtype: Annotated[
        KvCacheDtype, about("Number format of KVCache; fp8 halves its bytes, auto takes dtype.")
    ] = "auto"
    served_name: Annotated[
        str,
        about(
            "Name of the model in the API; empty takes the model's own name.", "--served-model-name"
        ),
    ] = ""
    max_model_tokens: Annotated[
        int,
        about(
            "Most tokens of prompt and answer together; 0 allows what model and pool can hold.",
            "--max-model-len",
            ge=0,
        ),
    ] = 0
    lora_modules: Annotated[
        tuple[str, ...],
        about(
            "A LoRA adapter, which requests choose as their model; several may follow the flag.",
            metavar="NAME=PATH...",
        ),
    ] = ()
    chat_template: Annotated[
        str, about("File with a chat template (Jinja) in place of the model's own.")
    ] = ""


class ClusterConfig(Struct, frozen=True):
    """Number of instances of each role to start, and who starts them."""

    prefill: Annotated[int, about("Number of prefill instances.", ge=0)] = 1
    decode: Annotated[int, about("Number of decode instances.", ge=0)] = 1
    mixed: Annotated[int, about("Number of instances that both prefill and decode.", ge=0)] = 0
    attention: Annotated[
        int,
        about(
            "Number of attention workers, which keep KVCache for the instances that decode.", ge=0
        ),
    ] = 0
    launcher: Annotated[
        Launcher,
        about("What starts the processes: this machine by itself, or a Ray cluster."),
    ] = "local"

    @property
    def num_workers(self) -> int:
        """Number of all worker processes."""
        return self.prefill + self.decode + self.mixed + self.attention

    @property
    def num_instances(self) -> int:
        return self.prefill + self.decode + self.mixed

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of each instance, in the order in which they are started."""
        counts = ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        return tuple(role for role, n in (*counts, (Role.MIXED, self.mixed)) for _ in range(n))

    @property
    def attention_owners(self) -> int:
        """Number of instances that decode, among which attention workers are distributed."""
        return self.decode + self.mixed

    @property
    def attention_each(self) -> int:
        """Number of attention workers of each instance that decodes."""
        return self.attention // self.attention_owners if self.attention else 0

    def num_processes(self, engine: EngineConfig) -> int:
        """Stages and ranks of all instances, and attention workers; at least 1."""
        instances = sum(engine.degree(role).num_processes for role in self.roles)
        return max(instances + self.attention, 1)


class AttentionConfig(Struct, frozen=True):
    """How KVCache is divided among an instance's attention workers. "request": a worker holds whole
    requests; "head": some KV heads (Lamina); "tokens": whole short requests, and segments of long
    ones. The instance itself keeps `own_tokens`, and attends to them."""

    partition: Annotated[
        AttentionPartition,
        about(
            "What each attention worker keeps: requests, heads, or token ranges.",
            "--attention-partition",
        ),
    ] = "request"
    own_tokens: Annotated[
        int,
        about(
            "Tokens of KVCache that a decode instance keeps outside its attention workers.",
            "--attention-own-tokens",
            ge=0,
        ),
    ] = 0


class PoolConfig(Struct, frozen=True):
    """The KVCache pool. `dram_tokens_per_instance == 0` means a quarter of the machine's free
    memory, divided among its instances, with at most 65,536 tokens each. An SSD tier is used if
    `ssd_tokens_per_instance` or `ssd_bytes_per_instance` is above 0. `ssd_admission`: the rule that
    decides which blocks are written to the SSD."""

    block_tokens: Annotated[
        int, about("Tokens of one KVCache block, a multiple of 16.", "--block-size")
    ] = 64
    dram_tokens_per_instance: Annotated[
        int,
        about(
            "Tokens of KVCache in memory per instance; 0 takes a share of the free memory.",
            "--kv-tokens",
            ge=0,
        ),
    ] = 0
    prefix_caching: Annotated[
        bool, about("Reuse the KVCache of equal prefixes.", "--enable-prefix-caching")
    ] = True
    eviction: Annotated[PolicyName, about("Policy that chooses which cached blocks to evict.")] = (
        "predictive"
    )
    ssd_tokens_per_instance: Annotated[
        int, about("Tokens of KVCache on disk per instance; 0 uses no disk.", "--ssd-tokens", ge=0)
    ] = 0
    ssd_bytes_per_instance: Annotated[
        int,
        about(
            "Bytes of KVCache on disk per instance, instead of tokens; 0 uses no disk.",
            "--ssd-bytes",
            ge=0,
        ),
    ] = 0
    ssd_admission: Annotated[SsdAdmission, about("Which blocks to write to the SSD.")] = "always"
    ssd_write_ahead: Annotated[
        bool,
        about("Copy blocks to the SSD while they are in use, so that they survive a power cut."),
    ] = True
    ssd_folder: Annotated[
        str, about("Folder for KVCache on disk; each instance uses a subfolder of its own.")
    ] = ""
    keep_memory: Annotated[
        str,
        about(
            "Folder in memory, such as /dev/shm/moonpool, where KVCache survives a restart of the"
            ' server. Unless given, it survives only that of a worker; "off" keeps nothing.',
            "--keep-memory",
            metavar="FOLDER",
        ),
    ] = ""

    @property
    def wants_ssd(self) -> bool:
        return bool(self.ssd_tokens_per_instance or self.ssd_bytes_per_instance)


class MooncakeConfig(Struct, frozen=True):
    """A Mooncake Store that replaces the SSD tier. The keys are those of Mooncake's own
    configuration. Without an address, no store is used."""

    master_server_address: Annotated[
        str,
        about(
            "Keep KVCache in the Mooncake Store of this master instead of on disk.",
            "--mooncake-master",
            metavar="HOST:PORT",
        ),
    ] = ""
    metadata_server: Annotated[str, about("Metadata server of the Mooncake Store.")] = (
        "P2PHANDSHAKE"
    )
    protocol: Annotated[
        MooncakeProtocol, about("Protocol by which the Mooncake Store moves data.")
    ] = "tcp"
    device_name: Annotated[
        str, about("Network device of the Mooncake Store; empty leaves the choice to the store.")
    ] = ""
    global_segment_size: Annotated[
        int, about("Bytes of memory that each instance lends to the Mooncake Store.", ge=0)
    ] = 0


class NetworkConfig(Struct, frozen=True):
    """`NetworkConfig` says where the head listens for workers, and how they exchange blocks. A
    worker's default address for its peers is the address by which it reaches the head."""

    head_host: Annotated[
        str, about("Address at which the head listens for workers.", protects=True)
    ] = "127.0.0.1"
    head_port: Annotated[
        int,
        about("Port at which the head listens for workers; 0 takes a free one.", ge=0, le=65535),
    ] = 0
    keep_workers: Annotated[
        bool,
        about(
            "When the head is told to stop, workers of other machines stay for the next head, for a"
            " minute."
        ),
    ] = False
    use_shared_memory: Annotated[
        bool, about("Move blocks between processes of one machine through shared memory.")
    ] = True
    nixl: Annotated[
        bool, about("Move blocks between machines by NIXL: RDMA, or what else UCX finds.")
    ] = False


class ConductorConfig(Struct, frozen=True):
    placement: Annotated[
        PolicyName, about("Policy that chooses the prefill instance of a request.")
    ] = "kvcache-centric"
    admission: Annotated[
        PolicyName, about("Policy that rejects requests whose service levels would be missed.")
    ] = "goodput"
    decode_wait: Annotated[
        bool,
        about(
            "Let an admitted request wait before its first token until its decode instance's batch"
            " has room within the TBT service level. Off: it joins at once, after a last check."
        ),
    ] = True
    kvcache_balancing_threshold: Annotated[
        float,
        about(
            "Fetch a remote prefix only if it is this many times longer than the local one.", ge=1
        ),
    ] = 1.0
    max_attempts: Annotated[
        int, about("Attempts of a request without a new token before it fails.", ge=1, le=10)
    ] = 5
    load_limit: Annotated[
        float,
        about("Reject requests above this ratio of predicted latency to its service level.", gt=0),
    ] = 1.0
    decode_prediction: Annotated[
        DecodePrediction, about("How predictive admission estimates when answers end.")
    ] = "duration"
    inline_prefill: Annotated[
        bool,
        about(
            "Prefill short prompts inside a decode batch where its TBT service level still holds."
        ),
    ] = True
    inline_chunks: Annotated[
        bool,
        about(
            "Prefill long prompts in chunks inside a decode batch, where its TBT service level"
            " still holds and the prefill instances would take twice as long. Off: mixed"
            " instances also keep both roles under a tight TBT service level."
        ),
    ] = True
    spare_copies_first: Annotated[
        bool, about("Evict further copies of a block first, and keep one copy in DRAM.")
    ] = True
    prefetch: Annotated[
        bool, about("Load the blocks of a session from the SSD before its next turn is due.")
    ] = True
    replicate: Annotated[
        bool, about("Copy a hot prefix to another instance before a request needs it there.")
    ] = False
    programs: Annotated[
        ProgramRules,
        about(
            "Which agents are served as whole programs: those that clients name, or also those"
            " recognised by a growing prompt."
        ),
    ] = "named"
    learning: Annotated[
        bool, about("Correct the profiled step times of instances by the measured ones.")
    ] = True
    seed: Annotated[
        int, about("Seed of the random placement, and of the noise of a simulation.")
    ] = 0
    role_balance: Annotated[
        RoleBalance,
        about("What to do when the ratio of prefill to decode instances does not fit the load."),
    ] = "off"
    role_balance_window_s: Annotated[
        float, about("Seconds of load that the role balance takes into account.", ge=1, le=86_400)
    ] = 300.0

    autoscale: Annotated[
        bool,
        about(
            "Compute how many instances of each role the load needs, for a metric and a webhook."
        ),
    ] = False
    autoscale_load: Annotated[
        float,
        about(
            "Share of its time that an instance should be busy; autoscale aims at it.",
            gt=0,
            le=1,
        ),
    ] = 0.7
    autoscale_webhook: Annotated[
        str, about("URL that gets the wanted numbers as JSON whenever they change.")
    ] = ""


class ParallelConfig(Struct, frozen=True):
    """The processes of one instance: pipeline stages, or tensor-parallel ranks."""

    num_stages: int = 1
    num_ranks: int = 1

    @property
    def num_processes(self) -> int:
        return self.num_stages * self.num_ranks


class SpeculativeConfig(Struct, frozen=True):
    """How tokens are guessed ahead, with vLLM's names. "ngram": the last tokens of a text are
    searched for earlier in it, or in what followed cached blocks of the same tenant. "draft_model":
    if these find nothing, or are right less often, `model`, a smaller model with the same
    tokenizer, guesses. The draft model's weights may be quantized, and its KVCache holds
    `draft_kv_tokens`; 0 means as many as fit in an eighth of the pool's bytes, and no more than the
    pool holds."""

    method: SpeculativeMethod
    model: str = ""
    quantization: Quantization = "none"
    draft_kv_tokens: Annotated[int, Meta(ge=0, le=1 << 32)] = 0
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=16)] = 4
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=32)] = 2
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=32)] = 4


class EngineConfig(Struct, frozen=True):
    """`kind`: the engine of the instances; "vllm" means running vLLM servers, each behind one
    instance (see `VllmConfig`). `device`: with "cuda", weights and KVCache are in the memory of the
    first GPU that the worker sees; each of its stages uses one GPU. The arena, from which blocks
    are transferred, stays in host memory. "auto" means "cuda" if the head finds a GPU.
    `pipeline_parallel_size`: number of stages of a prefill or mixed instance, each a process (in a
    simulation a node) with a share of the layers. `tensor_parallel_size`: number of its ranks, each
    with a share of every layer."""

    kind: Annotated[
        EngineKind,
        about("Engine of the workers; with vllm, each worker drives a vLLM server.", "--engine"),
    ] = "moonpool"
    chunk_tokens: Annotated[
        int, about("Most tokens of one step (the prefill chunk).", "--max-num-batched-tokens", ge=1)
    ] = 512
    max_sequences: Annotated[int, about("Most requests in one step.", "--max-num-seqs", ge=1)] = 128
    batching: Annotated[Batching, about("Policy that forms the batch of each step.")] = "chunked"
    threads: Annotated[
        int,
        about("CPU threads per process; 0 divides the cores among the processes.", ge=0, le=1024),
    ] = 0
    pinning: Annotated[Pinning, about("Pin each engine to cores of its own.")] = "on"
    device: Annotated[Device, about("Device that computes.")] = "cpu"
    staggered_decodes: Annotated[
        bool, about("Decode two half batches in turn, so that model and attention workers overlap.")
    ] = False
    speculative_config: Annotated[
        SpeculativeConfig | None,
        about('Verify guessed tokens, such as with {"method": "ngram"}.', metavar="JSON"),
    ] = None
    pipeline_parallel_size: Annotated[
        int,
        about(
            "Pipeline stages of a prefill or mixed instance; each has a share of the layers.",
            ge=1,
            le=64,
        ),
    ] = 1
    decode_pipeline_parallel_size: Annotated[
        int, about("Pipeline stages of a decode instance.", ge=1, le=64)
    ] = 1

    tensor_parallel_size: Annotated[
        int,
        about(
            "Tensor-parallel ranks of a prefill or mixed instance; each has a share of every layer."
        ),
    ] = 1
    decode_tensor_parallel_size: Annotated[
        int, about("Tensor-parallel ranks of a decode instance.")
    ] = 1

    def degree(self, role: Role) -> ParallelConfig:
        if role is Role.DECODE:
            return ParallelConfig(
                self.decode_pipeline_parallel_size, self.decode_tensor_parallel_size
            )
        return ParallelConfig(self.pipeline_parallel_size, self.tensor_parallel_size)

    @property
    def num_shards(self) -> int:
        """Shards of the computation, equal on all instances so that they can exchange blocks."""
        return max(self.tensor_parallel_size, self.decode_tensor_parallel_size)


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
    ray: RayConfig = RayConfig()
    hardware: HardwareConfig = HardwareConfig()
    api: ApiConfig = ApiConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    tls: TlsConfig = TlsConfig()

    def for_conductor(self) -> ConductorConfig:
        """Returns the Conductor's table. If instances do not size chunks by the TBT SLO, decode
        instances take no prompts: decodes beside a long prompt would break the SLO."""
        if self.engine.batching == "chunked" or not self.conductor.inline_chunks:
            return self.conductor
        return replace(self.conductor, inline_chunks=False)


def is_own_policy(name: str) -> bool:
    """Whether the name has the form "module:Class"."""
    return _OWN_POLICY.fullmatch(name) is not None
