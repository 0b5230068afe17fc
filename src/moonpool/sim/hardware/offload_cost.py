"""Computes the step time of decode with attention offloading (Lamina, arXiv 2405.01814v2).

Model devices hold the weights and compute everything but attention; attention devices hold the
KVCache only. Per layer and token, q, k and v travel to the attention devices and the attention
output travels back. In `OffloadCost`, n staggered batches on n - 1 model replicas keep both sides
busy (section 4.3), and one token of all n batches takes, per layer, the longest of

    n t_m / (n - 1)     the model replicas serve n batches
    n t_a               the attention devices serve n batches
    t_m + t_a + t_w     one batch passes model, attention and network

With one batch, only the last term counts. The query is sent first (section 4.2.2), so keys and
values travel while the attention to older tokens runs.

`MeasuredOffload` instead starts from the profile of a live instance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from moonpool.cost.fitted import FittedCost, OffloadParts
from moonpool.cost.model import Chunk, OneStage
from moonpool.sim.hardware.devices import Device
from moonpool.sim.hardware.model_shapes import ModelShape
from moonpool.sim.hardware.roofline import RooflineCost

INFLATION = 0.2
"""The share by which Lamina lets the network lengthen a step (alpha in section 3.1)."""
MIN_STAGGERED = 8
"""Smaller batches are not split in two; moonpool_engine/engine/staggered.py has the same bound."""
STRAIGHT = 1e-12
"""A relative distance from a straight line up to this value counts as a rounding error."""


def piecewise_steps_s(
    step_s: Callable[[int, int], float], batch: int, context_tokens: int, num_steps: int
) -> float:
    """Returns the seconds of `num_steps` decode steps whose contexts grow by one token each.

    `step_s(batch, context tokens)` must be piecewise linear in the context. If the middle step lies
    on the line between the first and the last step, the range counts as linear, with the mean as
    its step time; otherwise the range is halved.
    """
    first_s = step_s(batch, context_tokens)
    last_s = step_s(batch, context_tokens + batch * (num_steps - 1))
    if num_steps > 2:
        half = num_steps // 2
        on_line_s = first_s + (last_s - first_s) * half / (num_steps - 1)
        later = context_tokens + batch * half
        if abs(on_line_s - step_s(batch, later)) > STRAIGHT * on_line_s:
            return piecewise_steps_s(step_s, batch, context_tokens, half) + piecewise_steps_s(
                step_s, batch, later, num_steps - half
            )
    return num_steps * (first_s + last_s) / 2


@dataclass(frozen=True, slots=True)
class AttentionPool:
    """The attention devices, with the KV heads divided among them.

    If the heads do not divide evenly among the devices, the time is that of the devices with one
    head more.
    """

    device: Device
    num_devices: int

    def key_s(self, shape: ModelShape) -> float:
        """Attention of one decode to one context token in one layer, in seconds."""
        kv_heads = -(-shape.kv_heads // self.num_devices)
        heads = kv_heads * (shape.heads // shape.kv_heads)
        attention = self.device.attention
        num_bytes = 2 * kv_heads * shape.head_dim * shape.bytes_per_kv
        memory_s = num_bytes / (attention.bandwidth_share * self.device.memory_bytes_per_s)
        flops = 4 * heads * shape.head_dim
        return max(memory_s, flops / (attention.flops_share * self.device.peak_flops_per_s))

    def capacity_tokens(self, shape: ModelShape, memory_share: float) -> int:
        """KVCache tokens that fit; attention devices hold no weights."""
        kv_heads = -(-shape.kv_heads // self.num_devices)
        token_bytes = 2 * shape.layers * kv_heads * shape.head_dim * shape.bytes_per_kv
        return int(memory_share * self.device.memory_bytes / token_bytes)


@dataclass(frozen=True, slots=True)
class OffloadNetwork:
    """The network between model and attention devices. `bytes_per_s` is the total, one way."""

    bytes_per_s: float
    round_trip_s: float

    @staticmethod
    def of(model: Device, num_model: int, attention: AttentionPool) -> OffloadNetwork:
        """The NICs of the side with less bandwidth set the rate."""
        pool = attention.device
        sides = (
            num_model * model.nic_bytes_per_s * model.collective_share,
            attention.num_devices * pool.nic_bytes_per_s * pool.collective_share,
        )
        return OffloadNetwork(min(sides), 2 * max(model.nic_latency_s, pool.nic_latency_s))


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """The times of one batch in one layer. `network_s` is the time that attention does not hide."""

    model_s: float
    attention_s: float
    network_s: float

    @property
    def alone_s(self) -> float:
        """The time of the layer if no other batch is served."""
        return self.model_s + self.attention_s + self.network_s


class OffloadCost(OneStage):
    """Implements `StepCost` for one decode instance: `model` with its attention on `attention`.

    `num_batches` - 1 replicas of `model` serve `num_batches` batches. Raises ValueError for fewer
    than one batch.
    """

    def __init__(
        self,
        model: RooflineCost,
        attention: AttentionPool,
        network: OffloadNetwork,
        num_batches: int = 2,
        early_query: bool = True,
    ) -> None:
        if num_batches < 1:
            raise ValueError(f"attention offloading needs at least one batch, not {num_batches}")
        self.model = model
        self.attention = attention
        self.num_batches = num_batches
        self._network = network
        self._early_query = early_query
        shape = model.shape
        self._key_s = attention.key_s(shape)
        self._launch_s = attention.device.attention.launch_s
        element_bytes = shape.bytes_per_activation * shape.head_dim
        self._query_s = element_bytes * shape.heads / network.bytes_per_s
        self._kv_s = 2 * element_bytes * shape.kv_heads / network.bytes_per_s

    @property
    def num_replicas(self) -> int:
        """The number of model replicas."""
        return max(self.num_batches - 1, 1)

    def layer_times(self, batch: float, context_tokens: float) -> LayerTimes:
        """Times of one batch of `batch` decodes whose contexts sum to `context_tokens`."""
        layers = self.model.shape.layers
        model_s = self.model.dense_s(ceil(batch)) / layers
        attention_s = self._launch_s + self._key_s * context_tokens
        there_s, kv_s, back_s = self._query_s * batch, self._kv_s * batch, self._query_s * batch
        if self._early_query:
            # Attention to older tokens needs only the query; the new token is merged afterwards.
            kv_s = max(kv_s - attention_s, 0.0)
        return LayerTimes(
            model_s, attention_s, self._network.round_trip_s + there_s + kv_s + back_s
        )

    def step_s(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> float:
        """Chunks (recomputed prompts) run on the model devices before the decodes."""
        chunk_s = self.model.step_s(chunks, 0, 0) if chunks else 0.0
        if not decode_batch:
            return chunk_s
        return chunk_s + self._round_s(decode_batch, decode_context_tokens)

    def decode_steps_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        if not batch:
            return 0.0
        return piecewise_steps_s(self._round_s, batch, context_tokens, num_steps)

    def _round_s(self, batch: float, context_tokens: float) -> float:
        """Returns the time of one token of all batches."""
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
) -> float:
    """Lamina's BW_min (section 3.1): the bandwidth at which the network lengthens a step by
    `INFLATION`, with model and attention one after the other."""
    shape = model.shape
    key_s = attention.key_s(shape)
    attention_s = shape.layers * (attention.device.attention.launch_s + key_s * batch * context)
    token_bytes = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * shape.bytes_per_activation
    model_s = model.dense_s(batch) + model.head_s(batch)
    return token_bytes * batch * shape.layers / (INFLATION * (model_s + attention_s))


class MeasuredOffload(OneStage):
    """Implements `StepCost` from the profile of a live instance.

    The profiled instance had `parts.seen_workers` attention workers, or none, and one batch at a
    time. Its times are corrected for the difference to the simulated workers: the time of the
    simulated layers replaces the modelled time of the measured layers (model, messages, attention).
    The KVCache that the instance keeps (`own_tokens`) is one more share, which the instance attends
    to while the workers compute. With as many workers as in the profile, a step takes the profiled
    time. Two staggered batches overlap as in `OffloadCost`, limited by the number of cores.
    """

    def __init__(
        self,
        seen: FittedCost,
        parts: OffloadParts,
        num_workers: int,
        staggered: bool,
        own_tokens: int = 0,
    ) -> None:
        assert num_workers >= 1 and parts.cores >= 1 and parts.model
        self._seen = seen
        self._parts = parts
        self._workers = num_workers
        self._staggered = staggered
        self._own_tokens = own_tokens

    def step_s(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> float:
        chunk_s = self._seen.step_s(chunks, 0, 0) if chunks else 0.0
        return chunk_s + self._decode_s(decode_batch, decode_context_tokens)

    def decode_steps_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        if not batch:
            return 0.0
        return piecewise_steps_s(self._decode_s, batch, context_tokens, num_steps)

    def _attention_s(
        self, num_workers: int, own_tokens: int, batch: float, context_tokens: float
    ) -> tuple[float, float]:
        """Returns the attention time of each worker, and of the instance for the KVCache it keeps.

        Workers and instance compute at the same time if there are enough cores.
        """
        e, f, g = self._parts.attention
        places = num_workers + (own_tokens > 0)
        own_context = min(context_tokens / places, own_tokens)
        crowd = max(places / self._parts.cores, 1.0)
        each_s = e + f * batch / places + g * (context_tokens - own_context) / num_workers
        own_s = e + f * batch / places + g * own_context if own_tokens else 0.0
        return each_s * crowd, own_s * crowd

    def _decode_s(self, batch: int, context_tokens: float) -> float:
        if not batch:
            return 0.0
        model_s, seen_workers = self._model_s(batch), self._parts.seen_workers
        if seen_workers:
            seen_s = self._seen.decode_step_s(batch, 0) + self._seen.decode[2] * context_tokens
            seen = seen_workers, self._parts.seen_own_tokens
            seen_layers_s = self._serial_s(*seen, batch, context_tokens)
        else:  # local attention counts without its dependence on the context
            seen_s, seen_layers_s = self._seen.decode_step_s(batch, 0), model_s
        if self._staggered and batch >= MIN_STAGGERED:
            layers_s = self._staggered_s(batch, context_tokens)
        else:
            layers_s = self._serial_s(self._workers, self._own_tokens, batch, context_tokens)
        return max(seen_s + layers_s - seen_layers_s, model_s)

    def _serial_s(
        self, num_workers: int, own_tokens: int, batch: int, context_tokens: float
    ) -> float:
        """Returns the time of all layers, with model and attention one after the other."""
        attention_s, own_s = self._attention_s(num_workers, own_tokens, batch, context_tokens)
        return self._model_s(batch) + max(self._parts.message_s + attention_s, own_s)

    def _staggered_s(self, batch: int, context_tokens: float) -> float:
        """Returns the time of all layers of two staggered half batches."""
        half = ceil(batch / 2)
        attention_s, own_s = self._attention_s(
            self._workers, -(-self._own_tokens // 2), half, context_tokens / 2
        )
        model_s = self._model_s(half) + own_s
        shared_s = (model_s + attention_s * self._workers) / self._parts.cores
        longest_s = max(2 * model_s, 2 * attention_s, model_s + attention_s, 2 * shared_s)
        return self._parts.message_s + longest_s

    def _model_s(self, batch: int) -> float:
        points = self._parts.model
        before, before_s = points[0]
        for after, after_s in points:
            if batch <= after:
                share = (batch - before) / max(after - before, 1)
                return before_s + share * (after_s - before_s)
            before, before_s = after, after_s
        return before_s * batch / before
