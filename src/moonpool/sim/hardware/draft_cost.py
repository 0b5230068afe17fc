"""Computes the step times and the memory of a draft model in simulated instances.

The draft model runs on one device of its instance, as a live draft model runs in one process. A
round of guesses is a decode step of the draft model on that device. All devices of the instance
hold equal shares of the model and its KVCache, so the memory that the draft model takes on its
device stays unused on the others.
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
"""The overhead of a round of guesses in seconds, with CUDA graphs, to prepare rows and pick tokens.
A round has no scheduler, so this is less than a step's overhead. The value is assumed."""
PADDING_TOKENS = 1024
"""Vocabularies of one tokenizer differ by at most this many unused tokens."""
ANY_POSITIONS = 1 << 40
KEY = "engine.speculative_config"


@dataclass(frozen=True, slots=True)
class DraftHardware:
    """The draft model of an instance. `place` has the instance's own data of the draft model."""

    ground_truth: StepCost
    place: DraftModelPlace


def with_draft(
    node: NodeCost, config: Config, catalogue: Catalogue
) -> tuple[NodeCost, DraftHardware | None]:
    """Returns the node with the memory that the draft model leaves, and the draft model if any.
    Raises ConfigError if the draft model is unknown, does not fit, or has another vocabulary."""
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
    """Returns the memory of one device beside its share of the weights."""
    return MEMORY_SHARE * node.device.memory_bytes - node.shape.weight_bytes / node.num_devices


def _num_blocks(
    settings: SpeculativeConfig, shape: ModelShape, node: NodeCost, block_tokens: int
) -> int:
    """Returns the blocks of the draft model's KVCache: the configured number, or an eighth of the
    memory that its weights leave on the device, with at most the tokens of the model."""
    room_bytes = max(_room_bytes(node) - shape.weight_bytes, 0.0)
    fitting = int(KVCACHE_SHARE * room_bytes / shape.kv_bytes_per_token)
    tokens = settings.draft_kv_tokens or min(fitting, node.kv_capacity_tokens)
    return max(-(-tokens // block_tokens), 1)


def _left_tokens(node: NodeCost, shape: ModelShape, taken_bytes: float) -> int:
    """Returns the model's KVCache tokens beside the draft model, which attention devices do not
    lose."""
    if taken_bytes >= _room_bytes(node):
        raise ConfigError(
            f"{KEY}: {shape.name} and its KVCache need {taken_bytes / 1e9:.1f} GB of a device,"
            f" and {node.shape.name} leaves {_room_bytes(node) / 1e9:.1f} GB: use more devices, a"
            " smaller draft model or fewer draft_kv_tokens"
        )
    if node.attention is not None:
        return node.kv_capacity_tokens
    return kv_capacity_tokens(node.device, node.shape, node.num_devices, taken_bytes=taken_bytes)
