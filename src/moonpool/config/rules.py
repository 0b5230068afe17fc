"""The rules of a configuration beyond the type and range of each single value."""

from __future__ import annotations

import re
from math import inf

from moonpool.config.schema import check_all, check_ranges, require
from moonpool.config.slo import DEFAULT_CLASS, MAX_CLASSES
from moonpool.config.tables import (
    ADMISSIONS,
    ATTENTION_SEGMENT_TOKENS,
    EVICTIONS,
    PLACEMENTS,
    Config,
    ConfigError,
    VllmAddress,
    is_own_policy,
)
from moonpool.config.vllm import split_rank


def check_values(config: Config) -> None:
    """Raises ConfigError for all values out of range, and for values that contradict each other,
    with one problem for each part."""
    check_ranges(config)
    check_all(_PARTS, config)


def _check_cluster(config: Config) -> None:
    cluster = config.cluster
    require(
        bool(cluster.mixed or (cluster.prefill and cluster.decode) or config.vllm.endpoints),
        "cluster",
        "at least one prefill and one decode instance, or one mixed one",
    )
    require(
        bool(cluster.prefill) == bool(cluster.decode) or bool(cluster.mixed),
        "cluster",
        "both prefill and decode instances",
    )
    require(cluster.prefill + cluster.decode + cluster.mixed <= 65536, "cluster", "<= 65536")


def _check_block_tokens(config: Config) -> None:
    tokens = config.pool.block_tokens
    require(
        tokens > 0 and tokens % 16 == 0 and tokens <= 1024,
        "pool.block_tokens",
        "a multiple of 16, at most 1024",
    )


def _check_slo_classes(config: Config) -> None:
    names = [one.name for one in config.slo.classes]
    require(len(set(names)) == len(names), "slo.classes", "of different names")
    rest = f"of other names than {DEFAULT_CLASS!r}, which means the levels of requests without one"
    require(DEFAULT_CLASS not in names, "slo.classes", rest)
    require(len(names) <= MAX_CLASSES, "slo.classes", f"at most {MAX_CLASSES}")


def _check_role_balance(config: Config) -> None:
    require(
        config.conductor.role_balance != "switch" or config.hardware.nodes_per_prefill == 1,
        "conductor.role_balance",
        '"off" or "advise" while hardware.nodes_per_prefill is above 1: a group of nodes cannot'
        " become a decode instance",
    )


def _check_disk_read(config: Config) -> None:
    name = "hardware.ssd_read_bytes_per_s"
    require(config.hardware.ssd_read_bytes_per_s < inf, name, "a finite number")


def _check_disk_write(config: Config) -> None:
    name = "hardware.ssd_write_bytes_per_s"
    require(config.hardware.ssd_write_bytes_per_s < inf, name, "a finite number")


def _check_https(config: Config) -> None:
    for name in ("ssl_keyfile", "ssl_ca_certs"):
        require(
            bool(config.api.ssl_certfile) or not getattr(config.api, name),
            "api.ssl_certfile",
            f"given with api.{name}",
        )


def _check_web(config: Config) -> None:
    for origin in config.api.allowed_origins:
        wanted = "origins such as https://example.org, without a path, or *"
        require(_ORIGIN.fullmatch(origin) is not None, "api.allowed_origins", wanted)
    for host in config.api.allowed_hosts:
        wanted = "names such as api.example.org, without a port"
        require(_HOST.fullmatch(host) is not None, "api.allowed_hosts", wanted)


def _check_api_keys(config: Config) -> None:
    for key in config.api.api_keys:
        require(
            0 < len(key) <= 1024 and key.isascii() and key.isprintable() and " " not in key,
            "api.api_keys",
            "non-empty ASCII texts without spaces",
        )


def _check_tls(config: Config) -> None:
    tls = config.tls
    if not (tls.certfile or tls.keyfile or tls.ca_certs):
        return
    together = "given: TLS between machines needs a certificate and the authority of all parts"
    require(bool(tls.certfile), "tls.certfile", together)
    require(bool(tls.ca_certs), "tls.ca_certs", together)
    require(
        not config.network.nixl,
        "network.nixl",
        "false with tls.certfile: NIXL moves blocks without encryption; over TCP they have TLS",
    )


_WEB = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/[\w./-]*)?", re.ASCII)
_MODEL_OF_SERVER = re.compile(r"[\w./:@+-]{1,200}", re.ASCII)
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/\s]+")
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]", re.ASCII)
_RAY_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
_LORA_MODULE = re.compile(r"([A-Za-z0-9][\w./:-]{0,199})=(.+)", re.ASCII)


def lora_module(text: str) -> tuple[str, str]:
    """Parses NAME=PATH. Raises ConfigError."""
    match = _LORA_MODULE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"model.lora_modules has {text!r}: write NAME=PATH, with PEFT's folder of the adapter"
        )
    return match[1], match[2]


def _check_adapters(config: Config) -> None:
    names = [lora_module(text)[0] for text in config.model.lora_modules]
    if not names:
        return
    own = config.model.served_name or config.model.name
    name = "model.lora_modules"
    require(len({own, *names}) == len(names) + 1, name, "names that differ, also from the model's")
    require(len(names) <= 256, name, "at most 256 adapters")
    if config.engine.kind == "vllm":
        return
    require(not config.engine.staggered_decodes, name, "empty while decodes are staggered")
    require(config.engine.device != "cuda", name, 'empty while engine.device is "cuda"')


def _check_kv_dtype(config: Config) -> None:
    if config.model.kv_cache_dtype == "auto":
        return
    name = "model.kv_cache_dtype"
    require(config.engine.kind != "vllm", name, '"auto" with vLLM servers: they set their own')
    require(config.engine.device != "cuda", name, '"auto" while engine.device is "cuda"')


def _check_autoscale(config: Config) -> None:
    conductor = config.conductor
    require(
        not conductor.autoscale or not config.cluster.mixed,
        "conductor.autoscale",
        "false with mixed instances: it counts prefill and decode instances",
    )
    require(
        not conductor.autoscale or conductor.role_balance != "switch",
        "conductor.role_balance",
        '"off" or "advise" with conductor.autoscale: instances of the role that is short are added',
    )
    url = conductor.autoscale_webhook
    require(
        not url or (url.startswith(("http://", "https://")) and url.isprintable()),
        "conductor.autoscale_webhook",
        "an address that begins with http:// or https://",
    )


def _check_policies(config: Config) -> None:
    for name, value, built_in in (
        ("conductor.placement", config.conductor.placement, PLACEMENTS),
        ("conductor.admission", config.conductor.admission, ADMISSIONS),
        ("pool.eviction", config.pool.eviction, EVICTIONS),
    ):
        known = ", ".join(repr(one) for one in built_in)
        require(
            value in built_in or is_own_policy(value),
            name,
            f"one of {known}, or module:Class for your own, not {value!r}",
        )


def _check_vllm(config: Config) -> None:
    cluster = config.cluster
    named = config.vllm.places
    for place in (place for places in named.values() for place in places):
        vllm_place(place)
    if config.engine.kind != "vllm":
        require(not config.vllm.names_any, "engine.kind", '"vllm" where [vllm] names any')
        return
    require(
        not config.vllm.endpoints or not any(named.values()),
        "vllm.endpoints",
        "the only source of servers: put those that always are there into the file, too",
    )
    for role, places in named.items():
        number = getattr(cluster, role)
        require(
            not config.vllm.names_any or number == len(places),
            f"cluster.{role}",
            f"{len(places)}, as many as [vllm] names: moonpool's engine and vLLM do not mix",
        )
    require(not cluster.attention, "cluster.attention", '0 with engine.kind "vllm"')
    require(
        config.conductor.role_balance != "switch",
        "conductor.role_balance",
        '"off" or "advise" with engine.kind "vllm": a vLLM server keeps its role',
    )


def _check_ray(config: Config) -> None:
    ray, on_ray = config.ray, config.cluster.launcher == "ray"
    require(
        _RAY_NAME.fullmatch(ray.name) is not None, "ray.name", "letters, digits, dots and dashes"
    )
    require(on_ray or not ray.vllm_command, "cluster.launcher", '"ray" with ray.vllm_command')
    require(
        not ray.vllm_command or (config.engine.kind == "vllm" and not config.vllm.names_any),
        "ray.vllm_command",
        'given with engine.kind "vllm" alone: it starts the servers that [vllm] would name',
    )
    require(
        not ray.vllm_command or "{port}" in ray.vllm_command,
        "ray.vllm_command",
        "a command with {port}, where its server listens",
    )
    require(
        not ray.pool_bytes or bool(ray.vllm_command),
        "ray.pool_bytes",
        "0 without ray.vllm_command: moonpool's own instances have pools of their own",
    )
    require(
        not on_ray or not config.conductor.autoscale_webhook,
        "conductor.autoscale_webhook",
        'left out with cluster.launcher "ray": Ray gets the wanted numbers',
    )
    require(
        not on_ray or not (config.conductor.autoscale and config.cluster.attention),
        "conductor.autoscale",
        "false with attention workers: each of them belongs to one instance",
    )


def _check_speculation(config: Config) -> None:
    name, speculative = "engine.speculative_config", config.engine.speculative_config
    if speculative is None:
        return
    require(
        speculative.prompt_lookup_min <= speculative.prompt_lookup_max,
        f"{name}.prompt_lookup_min",
        f"at most prompt_lookup_max, which is {speculative.prompt_lookup_max}",
    )
    by_model = speculative.method == "draft_model"
    require(
        bool(speculative.model) == by_model,
        f"{name}.model",
        'the draft model\'s name with method "draft_model", and left out with others',
    )
    require(
        by_model or (speculative.quantization == "none" and not speculative.draft_kv_tokens),
        name,
        'without quantization and draft_kv_tokens unless its method is "draft_model"',
    )
    require(speculative.quantization != "fp8", f"{name}.quantization", '"none", "int8" or "int4"')
    require(
        config.engine.kind == "moonpool",
        name,
        'left out with engine.kind "vllm": start the vLLM servers with --speculative-config',
    )
    require(config.engine.device == "cpu", name, 'left out unless engine.device is "cpu"')


def _check_stages(config: Config) -> None:
    engine = config.engine
    require(
        config.hardware.nodes_per_prefill == 1 or engine.pipeline_parallel_size == 1,
        "hardware.nodes_per_prefill",
        "1 where engine.pipeline_parallel_size is above 1: each stage is a node",
    )
    _check_ranks(config)


def _check_ranks(config: Config) -> None:
    engine = config.engine
    for name in ("tensor_parallel_size", "decode_tensor_parallel_size"):
        require(getattr(engine, name) in (1, 2, 4, 8, 16), f"engine.{name}", "1, 2, 4, 8 or 16")
    if engine.num_shards == 1:
        return
    name = "engine.tensor_parallel_size"
    if engine.tensor_parallel_size == 1:
        name = "engine.decode_tensor_parallel_size"
    pipelines = max(engine.pipeline_parallel_size, engine.decode_pipeline_parallel_size)
    require(pipelines == 1, name, "1 where instances have stages (pipeline_parallel_size)")
    require(engine.device != "cuda", name, '1 while engine.device is "cuda": ranks run on CPUs')
    require(not config.cluster.attention, name, "1 with attention workers (cluster.attention)")
    require(
        config.hardware.nodes_per_prefill == 1,
        "hardware.nodes_per_prefill",
        f"1 where {name} is above 1: each rank is a node",
    )
    require(
        not config.hardware.attention_device,
        name,
        "1 with hardware.attention_device: decodes attend on other devices",
    )


def _check_attention(config: Config) -> None:
    hardware = config.hardware
    number, named = hardware.attention_devices_per_node, bool(hardware.attention_device)
    require(
        bool(number) == named,
        "hardware.attention_devices_per_node",
        "1 to 64 where hardware.attention_device names one, and 0 where it does not",
    )
    require(
        not named or config.engine.decode_pipeline_parallel_size == 1,
        "engine.decode_pipeline_parallel_size",
        "1 with hardware.attention_device: decodes attend on other devices",
    )
    require(
        not named or config.conductor.role_balance != "switch",
        "conductor.role_balance",
        '"off" or "advise" with hardware.attention_device: the devices that attend cannot prefill',
    )


def _check_mooncake(config: Config) -> None:
    mooncake = config.mooncake
    host, _, port = mooncake.master_server_address.rpartition(":")
    require(
        not mooncake.master_server_address or bool(host and port.isdigit()),
        "mooncake.master_server_address",
        "HOST:PORT of a mooncake_master",
    )
    require(
        not (mooncake.master_server_address and config.pool.wants_ssd),
        "mooncake.master_server_address",
        '"" where the pool has an SSD tier: an instance has an SSD or a store',
    )
    require(
        not (config.pool.ssd_tokens_per_instance and config.pool.ssd_bytes_per_instance),
        "pool.ssd_bytes_per_instance",
        "0 where pool.ssd_tokens_per_instance is above 0: give one of the two",
    )


def _check_attention_workers(config: Config) -> None:
    cluster, partition = config.cluster, config.attention.partition
    own_tokens = config.attention.own_tokens
    require(
        not own_tokens or partition != "head",
        "attention.own_tokens",
        '0 with attention.partition "head": all blocks are at all workers',
    )
    require(
        partition != "tokens" or ATTENTION_SEGMENT_TOKENS % max(config.pool.block_tokens, 1) == 0,
        "pool.block_tokens",
        f'a power of two with attention.partition "tokens": blocks must fill segments of'
        f" {ATTENTION_SEGMENT_TOKENS} tokens",
    )
    if not cluster.attention:
        require(partition == "request", "cluster.attention", "> 0 to choose attention.partition")
        require(not own_tokens, "cluster.attention", "> 0 to set attention.own_tokens")
        require(not config.engine.staggered_decodes, "cluster.attention", "> 0 to stagger decodes")
        return
    owners = max(cluster.attention_owners, 1)
    require(
        cluster.attention % owners == 0,
        "cluster.attention",
        f"a multiple of the {owners} instances that decode, which share them out evenly",
    )
    require(
        config.conductor.role_balance != "switch",
        "conductor.role_balance",
        '"off" or "advise" with attention workers: they serve instances that decode, always',
    )
    require(
        config.engine.device == "cpu",
        "engine.device",
        '"cpu" with attention workers: they attend with the CPU\'s kernels',
    )
    require(
        config.engine.decode_pipeline_parallel_size == 1
        and not (cluster.mixed and config.engine.pipeline_parallel_size > 1),
        "engine.decode_pipeline_parallel_size",
        "1 with attention workers (and pipeline_parallel_size of mixed instances): stages keep"
        " their own KVCache",
    )


def vllm_place(text: str) -> VllmAddress:
    """Parses "URL", "URL,EVENTS", "URL,EVENTS,REPLAY" or "URL,SLOTS". A URL may end with "@" and
    one of its data-parallel ranks, and then with "#" and the name of one of its models. Raises
    ConfigError."""
    url, *others = text.split(",")
    address, _, model = url.partition("#")
    web = _WEB.fullmatch(split_rank(address)[0])
    is_right = web is not None and int((web[2] or ":0")[1:]) <= 65535
    is_right = is_right and ("#" not in url or bool(_MODEL_OF_SERVER.fullmatch(model)))
    if is_right and len(others) == 1 and others[0].startswith("/"):
        return VllmAddress(url=url, slots=others[0])
    if (
        not is_right
        or len(others) > 2
        or not all(o.startswith(("tcp://", "ipc://")) for o in others)
    ):
        raise ConfigError(
            f"{text!r} names no server: use its URL, such as http://127.0.0.1:8100, and after"
            " a comma where it publishes KV events and repeats them, such as"
            " http://127.0.0.1:8100,tcp://127.0.0.1:5557,tcp://127.0.0.1:5558, or the folder of a"
            " llama-server's --slot-save-path, such as http://127.0.0.1:8080,/var/lib/slots"
        )
    return VllmAddress(**dict(zip(("url", "events", "replay"), (url, *others), strict=False)))


_PARTS = (
    _check_cluster,
    _check_attention_workers,
    _check_block_tokens,
    _check_mooncake,
    _check_slo_classes,
    _check_role_balance,
    _check_autoscale,
    _check_disk_read,
    _check_disk_write,
    _check_attention,
    _check_stages,
    _check_adapters,
    _check_speculation,
    _check_kv_dtype,
    _check_vllm,
    _check_ray,
    _check_policies,
    _check_https,
    _check_tls,
    _check_web,
    _check_api_keys,
)
