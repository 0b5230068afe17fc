"""The time of a step, operator by operator, from a device's figures and a model's shape.

A matrix product of T rows with a K x N shard takes

    launch + [memory^q + compute^q]^(1/q)
    memory  = (weight bytes + 2 T (K+N)) / (share of the memory's rate)
    compute = 2 ceil_tile(T) K N / (share of the peak)

Attention is counted per chunk, by FLOPs or KVCache bytes, whichever takes longer, and for all
decodes together. Norms, rotary embedding, activation and additions read and write at half the
memory's rate, and most of it is not divided among tensor-parallel devices. Each layer has two
all-reduces, and each step the engine's own overhead. Only + - * / and sqrt are used, so that every
machine gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import msgspec

from moonpool.cost.hardware import AllReduce, Device
from moonpool.cost.model import Chunk
from moonpool.cost.shapes import ModelShape

ENGINE_OVERHEAD_S = 0.003
"""Per step, with CUDA graphs and a lean scheduler; 15 to 25 ms is what eager engines take."""

ELEMENTWISE_LAUNCHES = 5  # two norms with their additions, rotary, KVCache write, activation
ELEMENTWISE_LAUNCH_S = 2e-6
MEMO_ENTRIES = 1 << 16

SoftMax = Callable[[float, float], float]


def soft_maximum(sharpness: int) -> SoftMax:
    """(a^q + b^q)^(1/q), without powers: their last bits differ between machines."""
    known: dict[int, SoftMax] = {1: _soft_1, 2: _soft_2, 4: _soft_4, 8: _soft_8}
    if sharpness not in known:
        raise ValueError(f"a soft maximum's sharpness must be 1, 2, 4 or 8, not {sharpness}")
    return known[sharpness]


def _soft_1(a: float, b: float) -> float:
    return a + b


def _soft_2(a: float, b: float) -> float:
    return sqrt(a * a + b * b)


def _soft_4(a: float, b: float) -> float:
    a, b = a * a, b * b
    return sqrt(sqrt(a * a + b * b))


def _soft_8(a: float, b: float) -> float:
    a, b = a * a, b * b
    a, b = a * a, b * b
    return sqrt(sqrt(sqrt(a * a + b * b)))


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product's share on one device."""

    name: str
    weights_s: float
    memory_s_per_row: float
    compute_s_per_row: float
    launch_s: float
    tile_rows: int
    soft: SoftMax

    def memory_s(self, rows: int) -> float:
        return self.weights_s + self.memory_s_per_row * rows

    def compute_s(self, rows: int) -> float:
        tile = self.tile_rows
        return self.compute_s_per_row * ((rows + tile - 1) // tile * tile)

    def time_s(self, rows: int) -> float:
        return self.launch_s + self.soft(self.memory_s(rows), self.compute_s(rows))


@dataclass(frozen=True, slots=True)
class StepParts:
    """Where a step's time goes. `parts` sum up to the step; `memory_s` and `compute_s` say how long
    the work on the devices would take if only that were the limit."""

    parts: dict[str, float]
    compute_s: float
    memory_s: float
    launch_s: float
    communication_s: float

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())

    @property
    def regime(self) -> str:
        """What the step is bound by: compute, memory, launch or communication."""
        limits = {
            "compute": self.compute_s,
            "memory": self.memory_s,
            "launch": self.launch_s,
            "communication": self.communication_s,
        }
        return max(limits, key=lambda name: limits[name])


class RooflineCost:
    """`shape` on `num_devices` devices in tensor parallel; implements `CostModel` and `StepCost`.

    Over several nodes (`num_nodes`), every all-reduce has a second part, over the NICs. Raises
    ValueError for numbers of devices that cannot be.
    """

    def __init__(
        self,
        device: Device,
        shape: ModelShape,
        num_devices: int = 1,
        num_nodes: int = 1,
        engine_overhead_s: float = ENGINE_OVERHEAD_S,
    ) -> None:
        self.device = device
        self.shape = shape
        self.num_devices = num_devices
        self.num_nodes = num_nodes
        self.engine_overhead_s = engine_overhead_s
        self._all_reduce = _all_reduce_row(device, shape, num_devices, num_nodes)
        self._set_products()
        self._set_attention()
        self._set_rest()
        self._dense_memo: dict[int, float] = {}
        self._head_memo: dict[int, float] = {0: 0.0}

    def _set_products(self) -> None:
        shape, tp = self.shape, self.num_devices
        heads, kv_heads = -(-shape.heads // tp), -(-shape.kv_heads // tp)
        ffn = -(-shape.ffn // tp)
        hidden, width = shape.hidden, shape.head_dim * heads
        self._products = (
            self._product("qkv", hidden, width + 2 * kv_heads * shape.head_dim),
            self._product("output", width, hidden),
            self._product("gate_up", hidden, ffn * (2 if shape.gated else 1)),
            self._product("down", ffn, hidden),
        )
        self._lm_head = self._product("lm_head", hidden, -(-shape.vocab // tp))

    def _product(self, name: str, k: int, n: int) -> Product:
        gemm, shape = self.device.gemm, self.shape
        rate = gemm.bandwidth_share * self.device.memory_bytes_per_s
        return Product(
            name=name,
            weights_s=shape.bytes_per_weight * k * n / rate,
            memory_s_per_row=shape.bytes_per_activation * (k + n) / rate,
            compute_s_per_row=2 * k * n / (gemm.flops_share * self.device.peak_flops_per_s),
            launch_s=gemm.launch_s,
            tile_rows=gemm.tile_tokens,
            soft=soft_maximum(gemm.sharpness),
        )

    def _set_attention(self) -> None:
        shape, attention, layers = self.shape, self.device.attention, self.shape.layers
        heads = -(-shape.heads // self.num_devices)
        kv_heads = -(-shape.kv_heads // self.num_devices)
        flops = 4 * layers * heads * shape.head_dim  # of one query and one key
        self._key_compute_s = flops / (attention.flops_share * self.device.peak_flops_per_s)
        kv_bytes = 2 * layers * kv_heads * shape.head_dim * shape.bytes_per_kv
        rate = attention.bandwidth_share * self.device.memory_bytes_per_s
        self._key_memory_s = kv_bytes / rate
        # A decode has one query for each key it reads, so one of the two always wins.
        self._decode_key_s = max(self._key_compute_s, self._key_memory_s)
        self._attention_launch_s = layers * attention.launch_s

    def _set_rest(self) -> None:
        shape, device, tp = self.shape, self.device, self.num_devices
        sharded = 2 * (shape.heads + shape.kv_heads) * shape.head_dim  # rotary, in and out
        sharded += 4 * shape.kv_heads * shape.head_dim  # K and V into the KVCache, in and out
        sharded += shape.ffn * (3 if shape.gated else 2)  # activation
        everywhere = 8 * shape.hidden  # two norms, each with its addition: two in, two out
        row_bytes = shape.bytes_per_activation * (everywhere + sharded / tp)
        rate = device.elementwise_share * device.memory_bytes_per_s
        self._elementwise_row_s = row_bytes / rate
        self._elementwise_launch_s = ELEMENTWISE_LAUNCHES * ELEMENTWISE_LAUNCH_S
        self._reduce_launch_s, self._reduce_row_s = 0.0, 0.0
        row_bytes = shape.activation_bytes_per_token
        if self._all_reduce is not None:
            self._reduce_launch_s = 2 * self._all_reduce.alpha_s
            self._reduce_row_s = 2 * row_bytes / self._all_reduce.bytes_per_s
        if self.num_nodes > 1:
            nodes = self.num_nodes
            nics = tp // nodes * device.nic_bytes_per_s * device.collective_share
            self._reduce_launch_s += 2 * 2 * (nodes - 1) * device.nic_latency_s
            self._reduce_row_s += 2 * row_bytes * 2 * (nodes - 1) / nodes / nics

    # -- StepCost

    @property
    def num_stages(self) -> int:
        return 1

    def step_s(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> float:
        tokens = logit_rows = decode_batch
        attention_s = 0.0
        if chunks:
            key_compute_s, key_memory_s = self._key_compute_s, self._key_memory_s
            attention_s = self._attention_launch_s
            for chunk in chunks:
                new, start = chunk.num_tokens, chunk.start
                tokens += new
                logit_rows += chunk.last
                compute_s = key_compute_s * (new * (start + 0.5 * (new + 1)))
                memory_s = key_memory_s * (start + new)
                attention_s += compute_s if compute_s > memory_s else memory_s
        if decode_batch:
            attention_s += self._attention_launch_s + self._decode_key_s * decode_context_tokens
        if tokens == 0:
            return 0.0
        dense_s = self._dense_memo.get(tokens)
        if dense_s is None:
            dense_s = self.dense_s(tokens)
        head_s = self._head_memo.get(logit_rows)
        if head_s is None:
            head_s = self.head_s(logit_rows)
        return self.engine_overhead_s + dense_s + head_s + attention_s

    def decode_steps_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        added = batch * (num_steps * (num_steps - 1) // 2)
        return num_steps * self.step_s((), batch, context_tokens) + self._decode_key_s * added

    def hop_s(self, num_tokens: int) -> float:
        return 0.0

    # -- CostModel

    @property
    def tile_tokens(self) -> int:
        return self.device.gemm.tile_tokens

    def prefill_s(self, num_tokens: int, cached_tokens: int) -> float:
        """In one step. At least one token is computed, for its logits."""
        new = max(num_tokens - cached_tokens, 1)
        start = max(num_tokens - new, 0)
        return self.step_s((Chunk(new, start, start, True),), 0, 0)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return self.step_s((), batch, context_tokens)

    def transfer_s(self, num_bytes: int, same_host: bool, num_sharing: int = 1) -> float:
        if num_bytes <= 0:
            return 0.0
        device = self.device
        link = device.pcie_bytes_per_s if same_host else device.nic_bytes_per_s
        rate = self.num_devices * link * device.rdma_share
        return device.nic_latency_s + num_bytes * max(num_sharing, 1) / rate

    # -- the parts

    def dense_s(self, tokens: int) -> float:
        """All layers' work on each token by itself, and its communication."""
        layer_s = self._elementwise_launch_s + self._elementwise_row_s * tokens
        layer_s += self._reduce_launch_s + self._reduce_row_s * tokens
        for product in self._products:
            layer_s += product.time_s(tokens)
        if len(self._dense_memo) >= MEMO_ENTRIES:
            self._dense_memo.clear()
        self._dense_memo[tokens] = seconds = self.shape.layers * layer_s
        return seconds

    def head_s(self, logit_rows: int) -> float:
        if logit_rows == 0:
            return 0.0
        if len(self._head_memo) >= MEMO_ENTRIES:
            self._head_memo.clear()
        self._head_memo[logit_rows] = seconds = self._lm_head.time_s(logit_rows)
        return seconds

    def chunk_attention_s(self, chunk: Chunk) -> float:
        return max(self._chunk_limits(chunk))

    def decode_attention_s(self, context_tokens: int) -> float:
        return self._decode_key_s * context_tokens

    @property
    def attention_launch_s(self) -> float:
        """All layers' calls, of the chunks or of the decodes."""
        return self._attention_launch_s

    def _chunk_limits(self, chunk: Chunk) -> tuple[float, float]:
        """By compute, and by memory."""
        new, start = chunk.num_tokens, chunk.start
        pairs = new * (start + 0.5 * (new + 1))
        return self._key_compute_s * pairs, self._key_memory_s * (start + new)

    def stage(self, num_stages: int) -> RooflineCost:
        """The longest of `num_stages` stages that share out the layers; the last, which has the LM
        head too."""
        layers = -(-self.shape.layers // num_stages)
        return RooflineCost(
            self.device,
            msgspec.structs.replace(self.shape, layers=layers),
            self.num_devices,
            self.num_nodes,
            self.engine_overhead_s,
        )

    def step_parts(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> StepParts:
        """The same step with its parts by name, for reports."""
        layers = self.shape.layers
        tokens = decode_batch + sum(chunk.num_tokens for chunk in chunks)
        rows = decode_batch + sum(chunk.last for chunk in chunks)
        if tokens == 0:
            return StepParts({}, 0.0, 0.0, 0.0, 0.0)
        calls = [(product, tokens, layers) for product in self._products]
        if rows:
            calls.append((self._lm_head, rows, 1))
        parts = {p.name: n * (p.time_s(rows) - p.launch_s) for p, rows, n in calls}
        limits = [self._chunk_limits(chunk) for chunk in chunks]
        elementwise_s = layers * self._elementwise_row_s * tokens
        launch_s = layers * self._elementwise_launch_s
        launch_s += sum(n * p.launch_s for p, _, n in calls)
        launch_s += self._attention_launch_s * (bool(chunks) + bool(decode_batch))
        communication_s = layers * (self._reduce_launch_s + self._reduce_row_s * tokens)
        parts["attention_prefill"] = sum(max(pair) for pair in limits)
        parts["attention_decode"] = self._decode_key_s * decode_context_tokens
        parts["elementwise"] = elementwise_s
        parts["all_reduce"] = communication_s
        parts["launch"] = launch_s
        parts["engine"] = self.engine_overhead_s
        compute_s = sum(n * p.compute_s(rows) for p, rows, n in calls)
        memory_s = sum(n * p.memory_s(rows) for p, rows, n in calls)
        return StepParts(
            parts=parts,
            compute_s=compute_s
            + sum(pair[0] for pair in limits)
            + self._key_compute_s * decode_context_tokens,
            memory_s=memory_s
            + elementwise_s
            + sum(pair[1] for pair in limits)
            + self._key_memory_s * decode_context_tokens,
            launch_s=launch_s + self.engine_overhead_s,
            communication_s=communication_s,
        )

    def regime(self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int) -> str:
        return self.step_parts(chunks, decode_batch, decode_context_tokens).regime


def _all_reduce_row(
    device: Device, shape: ModelShape, num_devices: int, num_nodes: int
) -> AllReduce | None:
    """None for a device alone. Raises ValueError if there is no such arrangement."""
    if num_devices < 1 or num_nodes < 1 or num_devices % num_nodes:
        raise ValueError(
            f"{num_devices} devices on {num_nodes} nodes: use a whole number, at least 1, on each"
        )
    if num_devices > shape.heads:
        raise ValueError(
            f"{shape.name} has {shape.heads} attention heads: it cannot be divided among "
            f"{num_devices} devices; use fewer"
        )
    per_node = num_devices // num_nodes
    if per_node == 1:
        return None
    row = device.all_reduce_row(per_node)
    if row is None:
        most = max((row.num_devices for row in device.all_reduce), default=1)
        raise ValueError(
            f"no all-reduce among {per_node} {device.name} of one node is known; use at most "
            f"{most}, or add a row to its all_reduce"
        )
    return row
