"""Computes the cost of several nodes as one instance, and the bytes that they send.

tp      tensor parallelism over all devices: two all-reduces per layer, within the nodes and then
        over the NICs
tp+sp   tensor parallelism within a node, sequence parallelism among nodes: the KVCache of each
        layer passes around a ring of the nodes
pp      pipeline parallelism: layers divided into stages, steps of whole prompts
cpp     chunked pipeline parallelism: the same stages, steps of chunks (Mooncake v3, section 5.1).
        pp and cpp differ only in the chunk size, so they share a cost

A `RooflineCost` is split by operator, so short inputs gain less from more nodes. Any other cost has
no known parts, so it is divided by the number of nodes, and the time on the NICs is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.config.tables import Parallelism
from moonpool.cost.model import Chunk, OneStage, StepCost
from moonpool.sim.hardware.devices import Device
from moonpool.sim.hardware.model_shapes import ModelShape
from moonpool.sim.hardware.roofline import RooflineCost


@dataclass(frozen=True, slots=True)
class Nic:
    """All NICs of a node together, as collectives achieve them."""

    bytes_per_s: float
    latency_s: float

    @staticmethod
    def of(device: Device, devices_per_node: int) -> Nic:
        """The NICs of a node with this many devices."""
        rate = device.nic_bytes_per_s * device.collective_share
        return Nic(bytes_per_s=devices_per_node * rate, latency_s=device.nic_latency_s)


def group_cost(
    base: StepCost, shape: ModelShape, num_nodes: int, kind: Parallelism, nic: Nic
) -> StepCost:
    """The cost of `num_nodes` nodes as one instance, from the cost `base` of a node alone.

    Raises ValueError if the model cannot be divided among this many nodes.
    """
    if num_nodes == 1:
        return base
    if kind in ("pp", "cpp"):
        if num_nodes > shape.layers:
            raise ValueError(
                f"{shape.name} has {shape.layers} layers: it cannot have {num_nodes} stages; "
                "use fewer nodes"
            )
        if isinstance(base, RooflineCost):
            return PipelineCost(base.stage(num_nodes), 1.0, num_nodes, shape, nic)
        return PipelineCost(base, 1.0 / num_nodes, num_nodes, shape, nic)
    if kind == "tp+sp":
        if isinstance(base, RooflineCost):
            return SequenceParallelCost(base, num_nodes, nic)
        return DividedCost(base, num_nodes, shape, nic, ring=True)
    if isinstance(base, RooflineCost):
        devices = base.num_devices * num_nodes
        return RooflineCost(base.device, shape, devices, num_nodes, base.engine_overhead_s)
    return DividedCost(base, num_nodes, shape, nic, ring=False)


class PipelineCost:
    """A pipeline of equal stages; a stage takes `share` times the time of `stage`.

    A hop to the next stage takes latency + activation bytes / NIC bytes per second.
    """

    def __init__(
        self, stage: StepCost, share: float, num_stages: int, shape: ModelShape, nic: Nic
    ) -> None:
        self.stage = stage
        self.share = share
        self._num_stages = num_stages
        self._hop_latency_s = nic.latency_s
        self._hop_token_s = shape.activation_bytes_per_token / nic.bytes_per_s

    @property
    def num_stages(self) -> int:
        return self._num_stages

    def step_s(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> float:
        return self.share * self.stage.step_s(chunks, decode_batch, decode_context_tokens)

    def decode_steps_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        return self.share * self.stage.decode_steps_s(batch, context_tokens, num_steps)

    def hop_s(self, num_tokens: int) -> float:
        return self._hop_latency_s + self._hop_token_s * num_tokens


class DividedCost(OneStage):
    """A cost without known parts, divided by the number of nodes, plus the time on the NICs.

    It ignores that small inputs are less efficient, that each node reads its weights, and overlap.
    `ring` chooses between sequence parallelism (the KVCache passes around a ring) and tensor
    parallelism (two all-reduces per layer).
    """

    def __init__(
        self, base: StepCost, num_nodes: int, shape: ModelShape, nic: Nic, ring: bool
    ) -> None:
        assert base.num_stages == 1 and num_nodes > 1
        self._base = base
        self._num_nodes = num_nodes
        layers, others = shape.layers, num_nodes - 1
        self._ring_token_s = self._reduce_token_s = 0.0
        if ring:
            self._launch_s = layers * others * nic.latency_s
            sent = others / num_nodes * shape.kv_bytes_per_token
            self._ring_token_s = sent / nic.bytes_per_s
        else:
            self._launch_s = 2 * layers * 2 * others * nic.latency_s
            sent = 2 * layers * 2 * others / num_nodes * shape.activation_bytes_per_token
            self._reduce_token_s = sent / nic.bytes_per_s

    def step_s(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> float:
        tokens, keys = decode_batch, 0
        for chunk in chunks:
            tokens += chunk.num_tokens
            keys += chunk.start + chunk.num_tokens
        if tokens == 0:
            return 0.0
        alone_s = self._base.step_s(chunks, decode_batch, decode_context_tokens)
        sent_s = self._reduce_token_s * tokens + self._ring_token_s * keys
        if keys or self._reduce_token_s:  # in a ring, each decode stays on one node
            sent_s += self._launch_s
        return alone_s / self._num_nodes + sent_s

    def decode_steps_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        alone_s = self._base.decode_steps_s(batch, context_tokens, num_steps)
        sent_s = self._reduce_token_s * batch + (self._launch_s if self._reduce_token_s else 0.0)
        return alone_s / self._num_nodes + (num_steps * sent_s if batch else 0.0)


class SequenceParallelCost(OneStage):
    """Ring attention: each node computes its share of a chunk's tokens with all weights.

    A node attends to the KVCache of each other node as this passes around the ring, so attention
    takes the longer of compute and transfer. Each decode stays on one node.
    """

    def __init__(self, base: RooflineCost, num_nodes: int, nic: Nic) -> None:
        assert num_nodes > 1
        self._base = base
        self._num_nodes = num_nodes
        others = num_nodes - 1
        self._ring_latency_s = base.shape.layers * others * nic.latency_s
        sent = others / num_nodes * base.shape.kv_bytes_per_token
        self._ring_token_s = sent / nic.bytes_per_s

    def step_s(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> float:
        base, nodes = self._base, self._num_nodes
        tokens = rows = 0
        attention_s = 0.0
        for chunk in chunks:
            tokens += chunk.num_tokens
            rows += chunk.last
            ring_s = self._ring_latency_s + self._ring_token_s * (chunk.start + chunk.num_tokens)
            attention_s += max(base.chunk_attention_s(chunk) / nodes, ring_s)
        if tokens + decode_batch == 0:
            return 0.0
        decodes = -(-decode_batch // nodes)
        attention_s += base.attention_launch_s * (bool(chunks) + bool(decode_batch))
        attention_s += base.decode_attention_s(decode_context_tokens) / nodes
        dense_s = base.dense_s(-(-tokens // nodes) + decodes) + base.head_s(rows + decodes)
        return base.engine_overhead_s + dense_s + attention_s

    def decode_steps_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        added = batch * (num_steps * (num_steps - 1) // 2)
        added_s = self._base.decode_attention_s(added) / self._num_nodes
        return num_steps * self.step_s((), batch, context_tokens) + added_s
