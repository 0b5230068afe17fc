"""A draft model of simulated instances: its step times, and the memory that it takes.

It runs on one device of its instance, as a live one runs in one process. A round of guesses is a
decode step of its shape on that device. The instance's devices hold equal shares of the model and
its KVCache, so what the draft model takes of its own device is used on none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moonpool.config.tables import Config, ConfigError, ModelConfig, SpeculativeConfig
from moonpool.cost.fitted import fit_to_ground_truth
from moonpool.cost.model import StepCost
from moonpool.scheduler.speculation.draft_model import KVCACHE_SHARE, DraftModelPlace
from moonpool.sim.hardware.catalogue import Catalogue
from moonpool.sim.hardware.model_shapes import ModelShape, in_formats
from moonpool.sim.hardware.node_cost import MEMORY_SHARE, NodeCost, kv_capacity_tokens
from moonpool.sim.hardware.roofline import RooflineCost

ROUND_OVERHEAD_S = 0.001
"""Seconds of each round of guesses, with CUDA graphs: its rows are prepared and its tokens are
picked. It has no scheduler, so it takes less than that of a step. This is an assumption."""
PADDING_TOKENS = 1024
"""Vocabularies of one tokenizer differ by unused tokens, and by no more than these."""
ANY_POSITIONS = 1 << 40
KEY = "engine.speculative_config"


@dataclass(frozen=True, slots=True)
class DraftHardware:
    """The draft model of an instance. `place`: what the instance knows of it."""

    ground_truth: StepCost
    place: DraftModelPlace


def with_draft(
    node: NodeCost, config: Config, catalogue: Catalogue
) -> tuple[NodeCost, DraftHardware | None]:
    """The node with the memory that the draft model leaves it, and the draft model; None without
    one. Raises ConfigError for one that is unknown, does not fit, or has another vocabulary."""
    settings = config.engine.speculative_config
    if settings is None or settings.method != "draft_model":
        return node, None
    if config.hardware.cost.endswith(".json"):
        raise ConfigError(
            f"{KEY}: {config.hardware.cost} has no step times of a draft model: use hardware.cost ="
            ' "roofline", or {"method": "ngram"}'
        )
    shape = _draft_shape(settings, catalogue, node.shape)
    num_blocks = _num_blocks(settings, shape, node, config.pool.block_tokens)
    num_tokens = num_blocks * config.pool.block_tokens
    taken_bytes = shape.weight_bytes + num_tokens * shape.kv_bytes_per_token
    left_tokens = _left_tokens(node, shape, taken_bytes)
    ground_truth = RooflineCost(node.device, shape, engine_overhead_s=ROUND_OVERHEAD_S)
    longest = shape.max_positions or ANY_POSITIONS
    cost = fit_to_ground_truth(
        ground_truth,
        config.engine.chunk_tokens,
        min(longest, num_tokens),
        node.network_latency_s,
        node.host_bytes_per_s,
        node.network_bytes_per_s,
        node.device.gemm.tile_tokens,
    )
    place = DraftModelPlace(cost, num_blocks, config.pool.block_tokens, longest)
    return replace(node, kv_capacity_tokens=left_tokens), DraftHardware(ground_truth, place)


def _draft_shape(
    settings: SpeculativeConfig, catalogue: Catalogue, verifier: ModelShape
) -> ModelShape:
    try:
        shape = catalogue.shape(settings.model)
    except ConfigError as error:
        raise ConfigError(
            f"{KEY}: {error} (a simulated draft model is a shape of the catalogue)"
        ) from None
    if abs(shape.vocab - verifier.vocab) > PADDING_TOKENS:
        raise ConfigError(
            f"{KEY}: {shape.name} has {shape.vocab:,} tokens and {verifier.name}"
            f" {verifier.vocab:,}, so their tokenizers differ: name one of the same family"
        )
    return in_formats(shape, ModelConfig(quantization=settings.quantization))


def _room_bytes(node: NodeCost) -> float:
    """What one device has beside its share of the weights."""
    return MEMORY_SHARE * node.device.memory_bytes - node.shape.weight_bytes / node.num_devices


def _num_blocks(
    settings: SpeculativeConfig, shape: ModelShape, node: NodeCost, block_tokens: int
) -> int:
    """Blocks of its KVCache: those asked for, else an eighth of what its weights leave its device,
    and no more tokens than the model has."""
    room_bytes = max(_room_bytes(node) - shape.weight_bytes, 0.0)
    fitting = int(KVCACHE_SHARE * room_bytes / shape.kv_bytes_per_token)
    tokens = settings.draft_kv_tokens or min(fitting, node.kv_capacity_tokens)
    return max(-(-tokens // block_tokens), 1)


def _left_tokens(node: NodeCost, shape: ModelShape, taken_bytes: float) -> int:
    """KVCache tokens of the model beside the draft model. Attention devices hold all they did."""
    if taken_bytes >= _room_bytes(node):
        raise ConfigError(
            f"{KEY}: {shape.name} and its KVCache need {taken_bytes / 1e9:.1f} GB of a device,"
            f" and {node.shape.name} leaves {_room_bytes(node) / 1e9:.1f} GB: use more devices, a"
            " smaller draft model or fewer draft_kv_tokens"
        )
    if node.attention is not None:
        return node.kv_capacity_tokens
    return kv_capacity_tokens(node.device, node.shape, node.num_devices, taken_bytes=taken_bytes)
