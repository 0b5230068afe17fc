"""The constants that were chosen for the experiments, each with its reason. No experiment overrides
any of these constants.

The constants of devices and kernels stand in `sim.hardware`, which all simulations use. The
constants are not tuned to any single table.
"""

from __future__ import annotations

from typing import Any

from moonpool.cost.model import StepCost
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.catalogue import BUILT_IN
from moonpool.sim.hardware.devices import Device
from moonpool.sim.hardware.model_shapes import ModelShape
from moonpool.sim.hardware.parallel_cost import Nic, group_cost
from moonpool.sim.hardware.roofline import RooflineCost

PAPERS_DEFAULTS: dict[str, dict[str, Any]] = {
    **DEFAULTS,
    "conductor": {
        **DEFAULTS.get("conductor", {}),
        "learning": False,
        "inline_prefill": False,
        "inline_chunks": False,
        "spare_copies_first": False,
    },
    "pool": {**DEFAULTS.get("pool", {}), "eviction": "lru"},
}
"""The papers' schedulers use formulas that were fitted beforehand, so learning is off. v3 names the
inline rule and FAST'25 does not; no figure of either says that decode nodes prefilled. The
schedulers of both papers evict neither by what other instances hold nor by predicted reuse."""

KV_UNLIMITED_TOKENS = 1 << 24
"""If a paper gives the batch size that its memory allowed, the number of sequences is limited, not
the blocks. Limiting both would cause preemption in experiments that had none."""

WORKLOAD_BATCHES = 40
"""Requests of a closed workload, in batches. SARATHI does not state the number. Its gains are those
of a steady state, and with 40 batches, the time to fill and drain the batch changes a gain by about
1 %."""

SARATHI_A100 = "A100-PCIE"
"""SARATHI says A100 80 GB. Its authors' next paper names Azure NC96ads v4, which has the PCIe
form."""

GPT3_A100 = "A100-SXM"
"""The paper has 8 servers with 8 A100 each and InfiniBand. Such machines have the SXM form."""

ABLATION_SEQUENCE_TOKENS = 1024
"""The sequence length in SARATHI's chunk-size ablation (Fig 13), assumed to be that of its Table 2
and Fig 7."""


def roofline(device: str, shape: str, num_devices: int = 1) -> RooflineCost:
    """The operator model with the catalogue's constants, as the simulator has it by default."""
    return RooflineCost(BUILT_IN.device(device), BUILT_IN.shape(shape), num_devices)


def pipeline(base: RooflineCost, num_stages: int) -> StepCost:
    """A pipeline of `num_stages` nodes like `base`."""
    nic = Nic.of(base.device, base.num_devices)
    return group_cost(base, base.shape, num_stages, "pp", nic)


def shape_of(name: str) -> ModelShape:
    return BUILT_IN.shape(name)


def device_of(name: str) -> Device:
    return BUILT_IN.device(name)


GPT3_ENGINE_OVERHEAD_S = 0.0
"""SARATHI's pipelines were simulated from profiles of operators: nothing was added to a step. With
the default of 3 ms a stage, a pipeline would pay for it eight times where one node pays once."""

PIPELINE_REQUESTS, PIPELINE_QUICK_REQUESTS = 10_000, 1_000
"""The paper's number of requests, and a smaller one for quick runs. With the smaller number gains
are up to a fifth smaller, because filling and draining the pipeline takes a larger share."""


def gpt3_stage() -> RooflineCost:
    """GPT-3 on one server of 8 devices, with the operators' time only."""
    device, shape = device_of(GPT3_A100), shape_of("gpt3-175b")
    return RooflineCost(device, shape, 8, 1, GPT3_ENGINE_OVERHEAD_S)


SARATHI_SERVE_A100 = "A100-PCIE"
"""Sarathi-Serve names Azure NC96ads v4: PCIe devices, pairs of which are joined by NVLink."""

SATURATED_OVERHEAD = 0.02
"""A budget is large enough if its chunks lengthen a prompt by no more than this. Sarathi-Serve says
only that chunks of 2048 cost close to nothing, and that more would buy nothing."""

LARGEST_BUDGET_TOKENS = 8192
BUDGET_STEP_TOKENS = 128
"""Budgets are searched up to the longest prompt of its chat data, in tiles."""

ABLATION_DRAWS, ABLATION_QUICK_DRAWS = 5, 1
"""Workloads drawn for Sarathi-Serve's Table 4. The paper ran one workload of 128 requests. In such
a run the median TTFT near saturation varies by half, so ours is the median of several runs."""


SERVE_RATES = tuple(round(0.02 * 1.1**step, 4) for step in range(64))
"""Requests per second, from 0.02 to 8.1: the one set of rates on which all capacities of
Sarathi-Serve are found."""

SERVE_REQUESTS, SERVE_QUICK_REQUESTS = 256, 32
"""Requests of each run. The paper has 2048 requests, which take eight times as long; with them, the
rate at the queue's limit is one step lower."""


# Mooncake

MOONCAKE_NODES = 16
"""Nodes of FAST'25's cluster in all experiments of sections 5.2 and 5.4."""

MOONCAKE_PREFILL, MOONCAKE_DECODE = 8, 8
"""The split is printed nowhere but in Fig 15; Fig 11's most replicated keys stop at 8 replicas,
which is a whole prefill pool of 8, and v3 names 8P+8D."""

MOONCAKE_QUICK_REQUESTS = 1_000

VLLM_CHUNK_TOKENS = 512
VLLM_PROMPT_TOKENS = 131_072
VLLM_SEQUENCES = 256
"""The defaults of vLLM v0.5.1: the tokens of a step with chunked prefill, and without it (the
model's longest prompt), and the number of sequences. The paper names the version and no setting."""

MOONCAKE_SPEEDS, MOONCAKE_QUICK_SPEEDS = (1.0, 1.2, 1.4), (1.0,)
"""Replay speeds at which FAST'25's placements are compared. No figure of its section 5.2 states its
load. So the result at the trace's own speed is quoted, and the other speeds show how it depends on
the load."""

MOONCAKE_BUSY_SPEED = 1.5
"""The replay speed at which plain vLLM is within the limits of Fig. 1 for the same share of
requests as in the paper."""

SYNTHETIC_RPS = 3.16
"""FAST'25 prints no rate for the synthetic trace. At this rate, computing all prompts
takes the mean TTFT of its Fig. 13, 2.62 s on 8 prefill nodes: queueing and prefill alone."""

RATE_SPEEDS = (0.5, 4.5)
MOONCAKE_RATE_STEPS, MOONCAKE_QUICK_RATE_STEPS = 8, 2
"""Figs 13 and 15 print no rate. The rate is inferred from one of the figure's own points, once, and
holds for all others: the search halves the range between these multiples of the trace's speed this
many times."""

V3_SPEED = 1.4
"""Speed of the replay in v3's Fig. 8, by the mean TTFT of its random placement; see there."""

OVERLOAD_SPEED, OVERLOAD_SPEEDS = 2.0, (2.0, 2.5, 3.0)
"""v3's Table 3 is at twice the speed; the other speeds show how the result depends on it."""

OVERLOAD_TBT_S = 0.035
"""Time between tokens in v3's Table 3. The paper says 0.1 s, at which the decode pool of FAST'25's
measurements is never full; this value is what the paper's cluster gives on average at twice the
trace's speed."""

FLUCTUATION_PREFILL, FLUCTUATION_DECODE, FLUCTUATION_SPEED = 16, 4, 5.0
"""The cluster of v3's Fig. 9, which says 20 machines: the split at which both pools are full with
the paper's own limits, and the speed that offers both a fifth more than they can do."""


V3_RATES = tuple(round(0.02 * 1.1**step, 4) for step in range(61))
"""Requests per second, from 0.02 to 6.1: the one set of rates on which all capacities of v3's Figs
11 and 12 are found. The limits are multiples of the P90s at the lowest rate."""

V3_REQUESTS, V3_QUICK_REQUESTS = 400, 24
"""Requests of each run of Figs 11 and 12. The paper prints no number."""


# Lamina

LAMINA_QUICK_REQUESTS = 1_500
"""All requests of a trace wait at the start, so the offered load exceeds every configuration's
capacity."""

LAMINA_WINDOW = (0.25, 0.75)
"""The throughput is measured between the ends of these shares of the requests, because the batch
fills before and drains afterwards."""
