"""The configuration of a cluster whose processes Ray places."""

from __future__ import annotations

from typing import Annotated

from moonpool.config.schema import about
from moonpool.types import Struct


class RayConfig(Struct, frozen=True):
    """What each instance asks of Ray, and how many instances there may be (docs/ray.md). The counts
    in `[cluster]` are minimums; `conductor.autoscale` adds instances and removes them again."""

    address: Annotated[
        str,
        about(
            "Ray cluster to run on, such as 10.0.0.1:6379; unless given, the one of this machine,"
            " else a new local one.",
            "--ray-address",
            metavar="HOST:PORT",
        ),
    ] = ""
    name: Annotated[
        str, about("Name of this cluster in Ray: the first part of the names of its actors.")
    ] = "moonpool"
    cpus: Annotated[
        float, about("CPUs of each instance, of each of its stages or ranks.", gt=0, le=1024)
    ] = 1.0
    gpus: Annotated[
        float,
        about("GPUs of each instance, of each of its stages; 0 computes on CPUs.", ge=0, le=64),
    ] = 0.0
    memory_bytes: Annotated[
        int, about("Memory that Ray sets aside for each instance; 0 asks for none.", ge=0)
    ] = 0
    ssd_resource: Annotated[
        str,
        about(
            "Resource of Ray that nodes with the SSD folder have, such as ssd; each instance takes"
            " one of it. Unless given, instances run on any node."
        ),
    ] = ""
    vllm_command: Annotated[
        str,
        about(
            "Command that starts a vLLM server for each instance, with {port}, and {events_port}"
            ' where it publishes KV events; needs engine.kind "vllm".'
        ),
    ] = ""
    pool_bytes: Annotated[
        int,
        about(
            "Memory for the pool that the vLLM servers of a node share (docs/pool-in-vllm.md): an"
            " actor on each node, or on each with GPUs. 0: none.",
            ge=0,
        ),
    ] = 0
    most_instances: Annotated[
        int, about("Most instances of one role that autoscale may run.", ge=0, le=65536)
    ] = 8
