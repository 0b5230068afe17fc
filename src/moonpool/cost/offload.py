"""Decode with its attention on other devices (Lamina, arXiv 2405.01814v2): what a step takes.

Model devices hold the weights and compute everything but attention; attention devices hold the
KVCache and nothing else. Per layer and token, q, k and v go over and the attention output comes
back. `num_batches` staggered batches on one replica fewer keep both sides busy (section 4.3):

    time of a round of all batches, per layer
        = the longest of   n t_m / (n - 1)     the replicas have n batches to serve
                           n t_a               the attention devices, too
                           t_m + t_a + t_w     a batch waits for itself: model, attention, wire

With one batch there is only the last. The query is sent first (section 4.2.2), so that keys and
values travel while attention to the older tokens runs. Nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from moonpool.cost.hardware import Device
from moonpool.cost.model import Chunk
from moonpool.cost.roofline import RooflineCost
from moonpool.cost.shapes import ModelShape

INFLATION = 0.2
"""The share by which Lamina lets the wire lengthen a step (alpha of its section 3.1)."""


STRAIGHT = 1e-12
"""Relative distance from a straight line that is rounding."""


@dataclass(frozen=True, slots=True)
class AttentionPool:
    """The attention devices, KV heads divided among them: a number of devices that does not divide
    the heads leaves some with one head more, and they set the pace."""

    device: Device
    num_devices: int

    def key_s(self, shape: ModelShape) -> float:
        """One decode's attention to one token of context, in one layer."""
        kv_heads = -(-shape.kv_heads // self.num_devices)
        heads = kv_heads * (shape.heads // shape.kv_heads)
        attention = self.device.attention
        num_bytes = 2 * kv_heads * shape.head_dim * shape.bytes_per_kv
        memory_s = num_bytes / (attention.bandwidth_share * self.device.memory_bytes_per_s)
        flops = 4 * heads * shape.head_dim
        return max(memory_s, flops / (attention.flops_share * self.device.peak_flops_per_s))

    def capacity_tokens(self, shape: ModelShape, memory_share: float) -> int:
        """KVCache that fits: there are no weights beside it."""
        kv_heads = -(-shape.kv_heads // self.num_devices)
        token_bytes = 2 * shape.layers * kv_heads * shape.head_dim * shape.bytes_per_kv
        return int(memory_share * self.device.memory_bytes / token_bytes)


@dataclass(frozen=True, slots=True)
class Wire:
    """Between the two sides. `bytes_per_s`: of all model devices' NICs together, one way."""

    bytes_per_s: float
    round_trip_s: float

    @staticmethod
    def of(model: Device, num_model: int, attention: AttentionPool) -> Wire:
        """As the NICs of the narrower side achieve it."""
        pool = attention.device
        sides = (
            num_model * model.nic_bytes_per_s * model.collective_share,
            attention.num_devices * pool.nic_bytes_per_s * pool.collective_share,
        )
        return Wire(min(sides), 2 * max(model.nic_latency_s, pool.nic_latency_s))


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Of one batch, per layer. `wire_s` is what is left of the wire beside the attention."""

    model_s: float
    attention_s: float
    wire_s: float

    @property
    def alone_s(self) -> float:
        return self.model_s + self.attention_s + self.wire_s


class OffloadCost:
    """Implements `StepCost` for one decode instance: `model` with its attention elsewhere.

    `num_batches` - 1 replicas of `model` serve as many batches. Raises ValueError for fewer than
    one batch.
    """

    def __init__(
        self,
        model: RooflineCost,
        attention: AttentionPool,
        wire: Wire,
        num_batches: int = 2,
        early_query: bool = True,
    ) -> None:
        if num_batches < 1:
            raise ValueError(f"attention offloading needs at least one batch, not {num_batches}")
        self.model = model
        self.attention = attention
        self.num_batches = num_batches
        self._wire = wire
        self._early_query = early_query
        shape = model.shape
        self._key_s = attention.key_s(shape)
        self._launch_s = attention.device.attention.launch_s
        element_bytes = shape.bytes_per_activation * shape.head_dim
        self._query_s = element_bytes * shape.heads / wire.bytes_per_s
        self._kv_s = 2 * element_bytes * shape.kv_heads / wire.bytes_per_s

    @property
    def num_stages(self) -> int:
        return 1

    @property
    def num_replicas(self) -> int:
        """Of the model."""
        return max(self.num_batches - 1, 1)

    def layer_times(self, batch: float, context_tokens: float) -> LayerTimes:
        """Of one batch of so many decodes whose contexts sum to `context_tokens`."""
        layers = self.model.shape.layers
        model_s = self.model.dense_s(ceil(batch)) / layers
        attention_s = self._launch_s + self._key_s * context_tokens
        there_s, kv_s, back_s = self._query_s * batch, self._kv_s * batch, self._query_s * batch
        if self._early_query:
            # The new token's part is merged when it is there; the older tokens need only the query.
            kv_s = max(kv_s - attention_s, 0.0)
        return LayerTimes(model_s, attention_s, self._wire.round_trip_s + there_s + kv_s + back_s)

    def step_s(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> float:
        """Chunks, of what must be computed again, run on the model devices before the decodes."""
        chunk_s = self.model.step_s(chunks, 0, 0) if chunks else 0.0
        if not decode_batch:
            return chunk_s
        return chunk_s + self._round_s(decode_batch, decode_context_tokens)

    def decode_steps_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        return self._rounds_s(batch, context_tokens, num_steps) if batch else 0.0

    def _rounds_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        """A round's time grows with the context in straight pieces, bending upwards only: where the
        middle lies on the line between the ends, all of it does."""
        first_s = self._round_s(batch, context_tokens)
        last_s = self._round_s(batch, context_tokens + batch * (num_steps - 1))
        mean_s = (first_s + last_s) / 2
        if num_steps > 2:
            half = num_steps // 2
            at_half_s = self._round_s(batch, context_tokens + batch * half)
            on_line_s = first_s + (last_s - first_s) * half / (num_steps - 1)
            if on_line_s - at_half_s > STRAIGHT * on_line_s:
                later = context_tokens + batch * half
                return self._rounds_s(batch, context_tokens, half) + self._rounds_s(
                    batch, later, num_steps - half
                )
        return num_steps * mean_s

    def hop_s(self, num_tokens: int) -> float:
        return 0.0

    def _round_s(self, batch: float, context_tokens: float) -> float:
        """All batches, one token each."""
        n = min(self.num_batches, int(batch))
        layers = self.model.shape.layers
        times = self.layer_times(batch / n, context_tokens / n)
        layer_s = times.alone_s
        if n > 1:
            layer_s = max(layer_s, n * times.model_s / self.num_replicas, n * times.attention_s)
        head_s = self.model.head_s(ceil(batch / n)) * n / self.num_replicas
        return self.model.engine_overhead_s + layers * layer_s + head_s


def least_bandwidth_bytes_per_s(
    model: RooflineCost,
    attention: AttentionPool,
    batch: int,
    context: int,
    inflation: float = INFLATION,
) -> float:
    """Lamina's BW_min (section 3.1): with it the wire lengthens a step by `inflation` at most, both
    sides working one after the other."""
    shape = model.shape
    key_s = attention.key_s(shape)
    attention_s = shape.layers * (attention.device.attention.launch_s + key_s * batch * context)
    token_bytes = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * shape.bytes_per_activation
    model_s = model.dense_s(batch) + model.head_s(batch)
    return token_bytes * batch * shape.layers / (inflation * (model_s + attention_s))
