"""Computes the time of a step by a roofline, operator by operator, from device and model figures.

A matrix product of T rows with a K x N shard takes

    t       = launch + [memory^q + compute^q]^(1/q)                       seconds
    memory  = (weight bytes + 2 T (K + N)) / (bandwidth share * bytes/s)
    compute = 2 ceil_to_tile(T) K N / (FLOPs share * peak FLOP/s)

where q (`Gemm.sharpness`) sets how sharply the two limits meet. Attention takes the longer of its
FLOPs and its KVCache reads, per prefill chunk, and once for all decodes together:

    FLOPs = 4 * layers * heads * head_dim per pair of query and key
    bytes = 2 * layers * kv_heads * head_dim * bytes_per_kv per key

Layers with a window count only the pairs and keys inside it, with contexts taken as equally long.
Latents (MLA) are expanded in prefills and read as they are in decodes; each device holds all of
them. Experts are shared out whole over the devices (`ExpertCost`). Layers in FP8 multiply at the
device's FP8 rate, if it has one.

Norms, rotary embedding, activation and additions move bytes at `elementwise_share` of the memory
bandwidth; tensor parallelism divides only part of them. A layer has two all-reduces, and a step has
the engine's own overhead. Only + - * / and sqrt are used, so every machine computes the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import msgspec

from moonpool.cost.model import Chunk, OneStage
from moonpool.sim.hardware.devices import AllReduce, Device
from moonpool.sim.hardware.matrix_product import Product, soft_maximum
from moonpool.sim.hardware.model_shapes import ModelShape

SPREAD = 2.0
"""The fullest device exceeds the mean by 1.4 standard deviations, the root of this value."""


@dataclass(frozen=True, slots=True)
class ExpertCost:
    """One layer's experts, shared out whole over the devices. `products`: those of one expert.

    T tokens with k of E experts each touch E (1 - (1 - k/E)^T) experts. Routing is taken as
    uniform, and the fullest device has 1.4 standard deviations more experts and rows than the mean.
    Every device has all tokens, so the sum over devices is the layer's usual all-reduce. Only + - *
    / and sqrt are used.
    """

    count: int
    per_token: int
    num_devices: int
    products: tuple[Product, ...]

    def touched(self, tokens: int) -> tuple[float, float]:
        """Returns the experts that the fullest device reads, and the rows that it computes."""
        devices = self.num_devices
        missed = power(1.0 - self.per_token / self.count, tokens)
        experts = self._fullest(self.count * (1.0 - missed))
        rows = self._fullest(float(tokens * self.per_token))
        rows = min(rows, float(tokens * self.per_token))
        return min(experts, -(-self.count // devices), rows), rows

    def _fullest(self, total: float) -> float:
        mean = total / self.num_devices
        return mean + sqrt(SPREAD * mean * (1.0 - 1.0 / self.num_devices))

    def limits_s(self, tokens: int) -> list[tuple[float, float]]:
        """Returns the memory time and the compute time of each product."""
        experts, rows = self.touched(tokens)
        limits = []
        for product in self.products:
            each = rows / experts
            tiles = int((each + product.tile_rows - 1) // product.tile_rows)
            compute_s = product.compute_s_per_row * product.tile_rows * max(tiles, 1) * experts
            memory_s = product.weights_s * experts + product.memory_s_per_row * rows
            limits.append((memory_s, compute_s))
        return limits

    @property
    def launch_s(self) -> float:
        """Launches of one layer: one for each product, of all experts together."""
        return sum(product.launch_s for product in self.products)

    def time_s(self, tokens: int) -> float:
        """Returns the time of one layer's experts, without launches."""
        return sum(
            product.soft(*pair)
            for product, pair in zip(self.products, self.limits_s(tokens), strict=True)
        )


def power(base: float, exponent: int) -> float:
    """base ** exponent for a whole exponent, by multiplications alone."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


ENGINE_OVERHEAD_S = 0.003
"""Per step, with CUDA graphs and a lean scheduler; engines in eager mode take 15 to 25 ms."""

ELEMENTWISE_LAUNCHES = 5  # the kernels are two norms, rotary, KVCache write, activation
ELEMENTWISE_LAUNCH_S = 2e-6
MEMO_ENTRIES = 1 << 16


@dataclass(frozen=True, slots=True)
class StepParts:
    """The breakdown of a step's time.

    `parts` sum to the step time. `memory_s` and `compute_s` are the times of the device work if
    memory bandwidth or compute were the only limit.
    """

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
        """The limit that binds the step: compute, memory, launch or communication."""
        limits = {
            "compute": self.compute_s,
            "memory": self.memory_s,
            "launch": self.launch_s,
            "communication": self.communication_s,
        }
        return max(limits, key=lambda name: limits[name])


class RooflineCost(OneStage):
    """`shape` on `num_devices` devices in tensor parallel; implements `StepCost`, and `CostModel`
    except for loads from an SSD.

    With several nodes, every all-reduce has a second phase over the NICs. Raises ValueError for
    impossible numbers of devices.
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
        kv_heads = -(-shape.kv_heads // tp)
        hidden, width = shape.hidden, shape.head_dim * -(-shape.heads // tp)
        attention: tuple[Product, ...] = (
            self._product("qkv", hidden, width + 2 * kv_heads * shape.head_dim),
            self._product("output", width, hidden),
        )
        if shape.latent is not None:
            attention = self._latent_products()
        embedding = shape.bytes_per_embedding
        self._lm_head = self._product("lm_head", hidden, -(-shape.vocab // tp), embedding)
        self.experts: ExpertCost | None = None
        mixture = shape.experts
        if mixture is None:
            self._products = (*attention, *self._feed_forward(shape.ffn))
            return
        self._products = (*attention, self._product("router", hidden, mixture.count))
        self._shared = self._feed_forward(mixture.shared_ffn) if mixture.shared_ffn else ()
        self._dense = self._feed_forward(shape.ffn) if mixture.dense_layers else ()
        each = mixture.bytes_per_weight or shape.bytes_per_weight
        products = (
            self._product("experts_gate_up", hidden, 2 * mixture.ffn, each),
            self._product("experts_down", mixture.ffn, hidden, each),
        )
        self.experts = ExpertCost(mixture.count, mixture.per_token, tp, products)

    def _feed_forward(self, ffn: int) -> tuple[Product, ...]:
        own, hidden = -(-ffn // self.num_devices), self.shape.hidden
        return (
            self._product("gate_up", hidden, own * (2 if self.shape.gated else 1)),
            self._product("down", own, hidden),
        )

    def _latent_products(self) -> tuple[Product, ...]:
        """Returns the products of MLA. Devices share out the heads; each computes the latents."""
        tp, products = self.num_devices, []
        for name, inputs, outputs, divided in self.shape.attention_products:
            if divided and name == "output":
                inputs = -(-inputs // tp)
            elif divided:
                outputs = -(-outputs // tp)
            products.append(self._product(name, inputs, outputs))
        return tuple(products)

    def _product(self, name: str, k: int, n: int, bytes_per_weight: float = 0.0) -> Product:
        gemm, shape = self.device.gemm, self.shape
        rate = gemm.bandwidth_share * self.device.memory_bytes_per_s
        flops_per_s = self.device.peak_flops_per_s
        if shape.fp8_products and name != "lm_head":
            flops_per_s = self.device.peak_fp8_flops_per_s or flops_per_s
        return Product(
            name=name,
            weights_s=(bytes_per_weight or shape.bytes_per_weight) * k * n / rate,
            memory_s_per_row=shape.bytes_per_activation * (k + n) / rate,
            compute_s_per_row=2 * k * n / (gemm.flops_share * flops_per_s),
            launch_s=gemm.launch_s,
            tile_rows=gemm.tile_tokens,
            soft=soft_maximum(gemm.sharpness),
        )

    def _set_attention(self) -> None:
        shape, attention, layers = self.shape, self.device.attention, self.shape.layers
        heads = -(-shape.heads // self.num_devices)
        kv_heads = -(-shape.kv_heads // self.num_devices)
        flops = 4 * layers * heads * shape.head_dim  # FLOPs per pair of query and key
        self.key_compute_s = flops / (attention.flops_share * self.device.peak_flops_per_s)
        kv_bytes = 2 * layers * kv_heads * shape.head_dim * shape.bytes_per_kv
        rate = attention.bandwidth_share * self.device.memory_bytes_per_s
        self._key_memory_s = kv_bytes / rate
        decode_compute_s = self.key_compute_s
        if shape.latent is not None:  # prefills expand keys and values, decodes read the latent
            part, rate_flops = shape.latent, attention.flops_share * self.device.peak_flops_per_s
            expanded = part.nope + part.rope + part.value
            self.key_compute_s = 2 * layers * heads * expanded / rate_flops
            decode_compute_s = 2 * layers * heads * (2 * part.rank + part.rope) / rate_flops
            self._key_memory_s = shape.kv_bytes_per_token / rate
        # A decode has one query per key it reads, so the same limit binds at any length.
        self._decode_key_s = max(decode_compute_s, self._key_memory_s)
        self._decode_key_compute_s = decode_compute_s
        self._windowed = shape.windowed_share
        self._attention_launch_s = layers * attention.launch_s

    def _set_rest(self) -> None:
        shape, device, tp = self.shape, self.device, self.num_devices
        # rotary reads and writes these elements
        sharded = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        # K and V are read, and written to the KVCache
        sharded += 4 * shape.kv_heads * shape.head_dim
        ffn = shape.ffn
        if shape.experts is not None:
            ffn = shape.experts.per_token * shape.experts.ffn + shape.experts.shared_ffn
        sharded += ffn * (3 if shape.gated else 2)  # activation
        everywhere = 8 * shape.hidden  # two norms with addition, each of 2 reads and 2 writes
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

    def step_s(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> float:
        tokens = logit_rows = decode_batch
        attention_s = 0.0
        if chunks:
            key_compute_s, key_memory_s = self.key_compute_s, self._key_memory_s
            attention_s = self._attention_launch_s
            for chunk in chunks:
                new, start = chunk.num_tokens, chunk.start
                tokens += new
                logit_rows += chunk.last
                if self._windowed:
                    attention_s += max(self.chunk_limits(chunk))
                    continue
                compute_s = key_compute_s * (new * (start + 0.5 * (new + 1)))
                memory_s = key_memory_s * (start + new)
                attention_s += compute_s if compute_s > memory_s else memory_s
        if decode_batch:
            keys = self._decode_keys(decode_batch, decode_context_tokens)
            attention_s += self._attention_launch_s + self._decode_key_s * keys
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
        added: float = batch * (num_steps * (num_steps - 1) // 2)
        if self._windowed and batch:
            first = num_steps * self._in_window(batch, context_tokens)
            seen = self._seen_in_steps(batch, context_tokens, num_steps) - first
            added = (1.0 - self._windowed) * added + self._windowed * seen
        return num_steps * self.step_s((), batch, context_tokens) + self._decode_key_s * added

    def _in_window(self, batch: int, context_tokens: int) -> int:
        """Keys that a layer with a window reads. Contexts are taken as equally long."""
        return min(context_tokens, batch * self.shape.window)

    def _seen_in_steps(self, batch: int, context_tokens: int, num_steps: int) -> int:
        """The sum of `_in_window` over steps that each add a token to every context."""
        most = batch * self.shape.window
        below = min(max(-(-(most - context_tokens) // batch), 0), num_steps)
        growing = below * context_tokens + batch * (below * (below - 1) // 2)
        return growing + (num_steps - below) * most

    def _decode_keys(self, batch: int, context_tokens: int) -> float:
        """Keys that decodes read, as a mean over the layers."""
        if not self._windowed:
            return context_tokens
        seen = self._in_window(batch, context_tokens)
        return (1.0 - self._windowed) * context_tokens + self._windowed * seen

    # -- CostModel

    @property
    def tile_tokens(self) -> int:
        return self.device.gemm.tile_tokens

    def prefill_s(self, num_tokens: int, cached_tokens: int) -> float:
        """Time of a prompt in one step. At least one token is computed, for its logits."""
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

    # -- parts of a step

    def dense_s(self, tokens: int) -> float:
        """Returns the time of all layers without attention, for `tokens` rows."""
        layer_s = self._elementwise_launch_s + self._elementwise_row_s * tokens
        layer_s += self._reduce_launch_s + self._reduce_row_s * tokens
        for product in self._products:
            layer_s += product.time_s(tokens)
        if len(self._dense_memo) >= MEMO_ENTRIES:
            self._dense_memo.clear()
        seconds = self.shape.layers * layer_s + self._mixture_s(tokens)
        self._dense_memo[tokens] = seconds
        return seconds

    def _mixture_s(self, tokens: int) -> float:
        """Returns the time of the feed-forward parts of a mixture, or 0 for other models."""
        experts, mixture = self.experts, self.shape.experts
        if experts is None or mixture is None or tokens == 0:
            return 0.0
        layer_s = experts.launch_s + experts.time_s(tokens)
        layer_s += sum(product.time_s(tokens) for product in self._shared)
        dense_s = sum(product.time_s(tokens) for product in self._dense)
        sparse = self.shape.layers - mixture.dense_layers
        return sparse * layer_s + mixture.dense_layers * dense_s

    def head_s(self, logit_rows: int) -> float:
        """Returns the time of the LM head for `logit_rows` rows."""
        if logit_rows == 0:
            return 0.0
        if len(self._head_memo) >= MEMO_ENTRIES:
            self._head_memo.clear()
        self._head_memo[logit_rows] = seconds = self._lm_head.time_s(logit_rows)
        return seconds

    def chunk_attention_s(self, chunk: Chunk) -> float:
        """Attention of a prefill chunk over all layers, without launches."""
        return max(self.chunk_limits(chunk))

    def decode_attention_s(self, context_tokens: int) -> float:
        """Attention of decodes whose contexts sum to `context_tokens`, without launches."""
        return self._decode_key_s * context_tokens

    @property
    def attention_launch_s(self) -> float:
        """Launches of all layers, for the chunks or for the decodes of a step."""
        return self._attention_launch_s

    def chunk_limits(self, chunk: Chunk) -> tuple[float, float]:
        """Returns the attention time by compute, and by memory."""
        new, start = chunk.num_tokens, chunk.start
        pairs: float = new * (start + 0.5 * (new + 1))
        keys: float = start + new
        if self._windowed:
            window, share = self.shape.window, self._windowed
            below = min(max(window - start, 0), new)  # tokens whose whole context is in the window
            near = below * (start + 0.5 * (below + 1)) + (new - below) * window
            pairs = (1.0 - share) * pairs + share * near
            keys = (1.0 - share) * keys + share * min(start + new, window + new)
        return self.key_compute_s * pairs, self._key_memory_s * keys

    def stage(self, num_stages: int) -> RooflineCost:
        """Returns the slowest of `num_stages` stages, with ceil(layers / stages) layers and the LM
        head."""
        layers = -(-self.shape.layers // num_stages)
        shape = msgspec.structs.replace(self.shape, layers=layers)
        if shape.experts is not None:  # earlier stages have the dense layers
            dense = max(shape.experts.dense_layers - (self.shape.layers - layers), 0)
            experts = msgspec.structs.replace(shape.experts, dense_layers=dense)
            shape = msgspec.structs.replace(shape, experts=experts)
        return RooflineCost(
            self.device,
            shape,
            self.num_devices,
            self.num_nodes,
            self.engine_overhead_s,
        )

    def step_parts(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> StepParts:
        """Returns the breakdown of `step_s`."""
        layers = self.shape.layers
        tokens = decode_batch + sum(chunk.num_tokens for chunk in chunks)
        rows = decode_batch + sum(chunk.last for chunk in chunks)
        if tokens == 0:
            return StepParts({}, 0.0, 0.0, 0.0, 0.0)
        calls = [(product, tokens, layers) for product in self._products]
        experts, expert_limits = self.experts, [(0.0, 0.0)]
        sparse = 0
        if experts is not None and self.shape.experts is not None:
            dense = self.shape.experts.dense_layers
            sparse = layers - dense
            calls += [(product, tokens, sparse) for product in self._shared]
            calls += [(product, tokens, dense) for product in self._dense]
            expert_limits = experts.limits_s(tokens)
        if rows:
            calls.append((self._lm_head, rows, 1))
        parts: dict[str, float] = {}
        for p, rows, n in calls:
            parts[p.name] = parts.get(p.name, 0.0) + n * (p.time_s(rows) - p.launch_s)
        if experts is not None:
            parts["experts"] = sparse * experts.time_s(tokens)
        keys = self._decode_keys(decode_batch, decode_context_tokens) if decode_batch else 0
        limits = [self.chunk_limits(chunk) for chunk in chunks]
        elementwise_s = layers * self._elementwise_row_s * tokens
        launch_s = layers * self._elementwise_launch_s
        launch_s += sum(n * p.launch_s for p, _, n in calls)
        launch_s += sparse * (0.0 if experts is None else experts.launch_s)
        launch_s += self._attention_launch_s * (bool(chunks) + bool(decode_batch))
        communication_s = layers * (self._reduce_launch_s + self._reduce_row_s * tokens)
        parts["attention_prefill"] = sum(max(pair) for pair in limits)
        parts["attention_decode"] = self._decode_key_s * keys
        parts["elementwise"] = elementwise_s
        parts["all_reduce"] = communication_s
        parts["launch"] = launch_s
        parts["engine"] = self.engine_overhead_s
        compute_s = sum(n * p.compute_s(rows) for p, rows, n in calls)
        compute_s += sparse * sum(pair[1] for pair in expert_limits)
        memory_s = sum(n * p.memory_s(rows) for p, rows, n in calls)
        memory_s += sparse * sum(pair[0] for pair in expert_limits)
        return StepParts(
            parts=parts,
            compute_s=compute_s
            + sum(pair[0] for pair in limits)
            + self._decode_key_compute_s * keys,
            memory_s=memory_s
            + elementwise_s
            + sum(pair[1] for pair in limits)
            + self._key_memory_s * keys,
            launch_s=launch_s + self.engine_overhead_s,
            communication_s=communication_s,
        )

    def regime(self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int) -> str:
        return self.step_parts(chunks, decode_batch, decode_context_tokens).regime


def _all_reduce_row(
    device: Device, shape: ModelShape, num_devices: int, num_nodes: int
) -> AllReduce | None:
    """The all-reduce figures within a node; None for one device per node. Raises ValueError."""
    if num_devices < 1 or num_nodes < 1 or num_devices % num_nodes:
        raise ValueError(
            f"{num_devices} devices cannot be divided among {num_nodes} nodes: use a whole "
            "number, at least 1, on each"
        )
    if num_devices > shape.heads:
        raise ValueError(
            f"{shape.name} has {shape.heads} attention heads: it cannot be divided among "
            f"{num_devices} devices; use fewer devices"
        )
    per_node = num_devices // num_nodes
    if per_node == 1:
        return None
    row = device.all_reduce_row(per_node)
    if row is None:
        most = max((row.num_devices for row in device.all_reduce), default=1)
        raise ValueError(
            f"there are no all-reduce figures for {per_node} {device.name} in a node; use at most "
            f"{most}, or add a row to all_reduce of the device in a catalogue file"
        )
    return row
