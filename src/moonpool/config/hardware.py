"""The table of the configuration about simulated hardware."""

from __future__ import annotations

from typing import Annotated, Literal

from moonpool.config.schema import about
from moonpool.types import Struct

Parallelism = Literal["tp", "tp+sp", "pp", "cpp"]


class HardwareConfig(Struct, frozen=True):
    """The hardware of simulated instances. `cost` is the cost model that the simulation uses: a
    calibrated model of the catalogue, "roofline" (of `device` and `shape`), or the file of a
    measured profile. `nodes_per_prefill` nodes form one prefill (or mixed) instance, joined by
    `parallelism`. Decode instances may run on other nodes, and may keep KVCache and attention on
    `attention_devices_per_node` additional devices (Lamina). Their own devices then only hold
    weights, and serve `decode_batches` staggered batches on one replica fewer."""

    cost: Annotated[
        str, about("Source of step times: a800-llama3-70b, roofline, or the file of a profile.")
    ] = "a800-llama3-70b"
    device: Annotated[str, about("Device of the catalogue; it implies roofline costs.")] = (
        "A800-SXM"
    )
    shape: Annotated[str, about("Model shape of the catalogue.")] = "llama3-70b"
    devices_per_node: Annotated[int, about("Devices of one node.", ge=1, le=64)] = 8
    nodes_per_prefill: Annotated[
        int, about("Nodes that form one prefill or mixed instance.", ge=1, le=64)
    ] = 1
    parallelism: Annotated[
        Parallelism, about("How the nodes of one prefill instance share a prompt.")
    ] = "tp"
    draft_acceptance: Annotated[
        float,
        about("Share of right drafts among those after right ones.", ge=0, le=1),
    ] = 0.0
    ssd_read_bytes_per_s: Annotated[
        float,
        about(
            "Read bandwidth of one node's SSD in bytes per second; 0 takes a usual SSD.",
            ge=0,
        ),
    ] = 0.0
    ssd_write_bytes_per_s: Annotated[
        float,
        about(
            "Write bandwidth of one node's SSD in bytes per second; 0 takes a usual SSD.",
            ge=0,
        ),
    ] = 0.0
    decode_device: Annotated[
        str, about("Device of decode instances; empty takes that of prefill instances.")
    ] = ""
    decode_devices_per_node: Annotated[
        int, about("Devices of one decode node; 0 takes as many as of a prefill node.", ge=0, le=64)
    ] = 0
    attention_device: Annotated[
        str,
        about("Device that keeps the KVCache of decode instances and computes their attention."),
    ] = ""
    attention_devices_per_node: Annotated[
        int, about("Attention devices of one decode node.", ge=0, le=64)
    ] = 0
    decode_batches: Annotated[
        int, about("Staggered batches of a decode instance with attention devices.", ge=1, le=8)
    ] = 2
