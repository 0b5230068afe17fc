"""Runs Lamina's decode instances under constant full load, and measures each configuration's
throughput.

The paper's baseline is vLLM "modified to drop prefill"; so here prompts cost nothing, on both
sides, and their KVCache is there when they are admitted. Everything else is decided by the
instance's own state machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from moonpool.cost.model import Chunk, StepCost
from moonpool.sim.hardware.model_shapes import ModelShape
from moonpool.sim.hardware.node_cost import MEMORY_SHARE, kv_capacity_tokens
from moonpool.sim.hardware.offload_cost import AttentionPool, OffloadCost, OffloadNetwork
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceError
from papers.constants import (
    LAMINA_QUICK_REQUESTS,
    LAMINA_WINDOW,
    device_of,
    roofline,
    shape_of,
)
from papers.mooncake.workload import find_workload
from papers.options import ExperimentError, Options
from papers.single_instance import SoloConfig, all_at_once, serve

COMPUTE, MEMORY = "H100-SXM", "H20"
USD_PER_H = {COMPUTE: 11.06, MEMORY: 4.63}
"""Prices of Lamina's Table 1; the price of the H20 is the paper's estimate."""
NUM_BATCHES = 2
LONGEST_PROMPT_TOKENS = 1 << 20
MAX_SEQUENCES = 4_096
TRACES = {"Azure-Conv": "azure-conv", "Kimi-Conv": "conversation", "Kimi-TA": "toolagent"}
TABLE_4 = {  # requests, mean prompt, mean output
    "Azure-Conv": (19_366, 1_154.7, 211.1),
    "Kimi-Conv": (12_031, 12_035.1, 342.6),
    "Kimi-TA": (23_608, 8_560.0, 182.1),
}


@dataclass(frozen=True, slots=True)
class DeviceSetup:
    """One configuration of the paper: how many devices compute, and how many only hold KVCache."""

    name: str
    num_compute: int
    num_memory: int
    device: str = COMPUTE  # of those that compute

    @property
    def usd_per_h(self) -> float:
        return self.num_compute * USD_PER_H[self.device] + self.num_memory * USD_PER_H[MEMORY]

    def cost(self, shape: ModelShape, num_batches: int = NUM_BATCHES) -> StepCost:
        model = roofline(self.device, shape.name, self.num_compute)
        if not self.num_memory:
            return model
        pool = self.pool
        wire = OffloadNetwork.of(device_of(self.device), self.num_compute, pool)
        return OffloadCost(model, pool, wire, num_batches)

    @property
    def pool(self) -> AttentionPool:
        return AttentionPool(device_of(MEMORY), self.num_memory)

    def kv_tokens(self, shape: ModelShape) -> int:
        """Returns the KVCache tokens that fit. Raises ConfigError if the model does not fit."""
        if self.num_memory:
            return self.pool.capacity_tokens(shape, MEMORY_SHARE)
        return kv_capacity_tokens(device_of(self.device), shape, self.num_compute)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and the devices of Lamina and of its rival, which cost about the same (Table 5).
    `all_memory` costs at most as much as Lamina's devices; the paper omits it."""

    model: str
    shape: str
    lamina: DeviceSetup
    rival: DeviceSetup
    all_memory: DeviceSetup


_LARGE = (
    DeviceSetup("Lamina (2,4)", 2, 4),
    DeviceSetup("4 H100", 4, 0),
    DeviceSetup("8 H20", 8, 0, MEMORY),
)
_SMALL = (
    DeviceSetup("Lamina (1,2)", 1, 2),
    DeviceSetup("2 H100", 2, 0),
    DeviceSetup("4 H20", 4, 0, MEMORY),
)
CASES = (
    Case("33B", "llama-33b", *_SMALL),
    Case("65B", "llama-65b", *_LARGE),
    Case("LLaMA3-70B", "llama3-70b", *_LARGE),
)


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """The throughput of a plant under full load."""

    tokens_per_s: float
    batch: float  # mean
    tbt_s: float  # mean

    def tokens_per_usd(self, plant: DeviceSetup) -> float:
        return self.tokens_per_s * 3600 / plant.usd_per_h


class _DecodesAlone:
    """A cost model in which prompts take no time, because their KVCache comes from other
    instances."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    @property
    def num_stages(self) -> int:
        return self._cost.num_stages

    def step_s(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> float:
        del chunks
        return self._cost.step_s((), decode_batch, decode_context_tokens)

    def decode_steps_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        return self._cost.decode_steps_s(batch, context_tokens, num_steps)

    def hop_s(self, num_tokens: int) -> float:
        return self._cost.hop_s(num_tokens)


def read_lengths(options: Options, trace: str) -> tuple[list[tuple[int, int]], str]:
    """Returns (prompt, output) lengths of a trace's requests, and the name of their source. Raises
    ExperimentError."""
    limit = LAMINA_QUICK_REQUESTS if options.quick else None
    name = TRACES[trace]
    if name == "azure-conv":
        path = options.find_trace(name)
        try:
            rows = list(islice(open_trace(path), limit))
        except TraceError as error:
            raise ExperimentError(str(error)) from None
        options.check_whole(name, len(rows))
        origin = f"the file {path.name}"
    else:
        workload = find_workload(options, name)
        rows, origin = list(workload.rows[:limit]), workload.origin
    lengths = [(row.input_tokens, row.output_tokens) for row in rows]
    return lengths, f"{trace}: {origin}, {len(rows):,} requests"


def run_plant(
    plant: DeviceSetup, shape_name: str, lengths: Sequence[tuple[int, int]]
) -> ThroughputResult:
    """Serves all requests on one instance. Raises ConfigError if the model does not fit."""
    shape = shape_of(shape_name)
    kv_tokens = plant.kv_tokens(shape)
    jobs = all_at_once(lengths)
    config = SoloConfig("chunked", LONGEST_PROMPT_TOKENS, MAX_SEQUENCES, kv_tokens)
    served = serve(jobs, _DecodesAlone(plant.cost(shape)), shape, config)
    ended = sorted((at, job.output_tokens) for at, job in zip(served.finished_s, jobs, strict=True))
    first, last = (int(share * len(ended)) for share in LAMINA_WINDOW)
    num_tokens = sum(tokens for _, tokens in ended[first:last])
    seconds = ended[last - 1][0] - ended[first - 1][0]
    tokens_per_s = num_tokens / seconds
    tbt_s = served.gap_s.mean
    return ThroughputResult(tokens_per_s, tokens_per_s * tbt_s, tbt_s)


def fitting(lengths: Sequence[tuple[int, int]], case: Case) -> list[tuple[int, int]]:
    """Returns the requests that fit on every plant of the case, so that all plants serve the same
    requests."""
    shape = shape_of(case.shape)
    least = min(plant.kv_tokens(shape) for plant in (case.lamina, case.rival, case.all_memory))
    return [(prompt, output) for prompt, output in lengths if prompt + output + 16 <= least]
