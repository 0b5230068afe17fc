"""v3's Fig. 12: simulated prompts of 16k to 128k tokens on four nodes, Mooncake against vLLM."""

from __future__ import annotations

from papers.finding import Check, Finding
from papers.mooncake.v3_capacity import (
    BALANCED,
    CHOSEN_INPUTS,
    MOONCAKE,
    ONE_BY_ONE,
    PAPER_INPUTS,
    VLLM,
    Claim,
    claim_rows,
    measure,
    panel,
)
from papers.mooncake.v3_datasets import SIMULATED, SIMULATED_PREFIXES
from papers.options import Options

GAINS = (5.25, 2.0, 0.5, 0.17)
RATES = ((0.2, 0.5, 1.0, 1.25), (0.2, 0.5, 0.6), (0.2, 0.3), (0.12, 0.14))
CLAIMS = tuple(
    Claim(data, gain, data is SIMULATED[-1], rates)
    for data, gain, rates in zip(SIMULATED, GAINS, RATES, strict=True)
)
NOTES = (
    (
        "vLLM's rates in the figure jump from 0.2 to 0.5 requests a second: for 16k, 525 % is 1.25 "
        "over the last rate that it shows within the limit. On one set of rates for all the order "
        "of the gains follows, the longest prompts gaining least, and their size does not."
    ),
    (
        "The paper has vLLM serve these prompts one by one, so that none stops another's decoding; "
        "an answer of 512 tokens then holds a node for 14 s, most of the gain at 16k. With batches "
        "vLLM's TTFT is near 3P+1D's there and its TBT is not, and from 64k on one by one is the "
        "better of the two, as the paper found."
    ),
)


def run(options: Options) -> Finding:
    found, origins = measure(options, CLAIMS, (ONE_BY_ONE, VLLM))
    return Finding(
        name="mooncake-v3-fig12",
        title="Prompts of 16k to 128k tokens on four nodes",
        source="Mooncake arXiv v3, Fig. 12 and Table 2",
        paper_inputs=(*PAPER_INPUTS, "half of each prompt is cached; vLLM serves one at a time"),
        chosen_inputs=(
            *origins,
            f"the cached half is one of {SIMULATED_PREFIXES} prefixes in turn",
            *CHOSEN_INPUTS,
        ),
        rows=tuple(claim_rows(found, CLAIMS, ONE_BY_ONE)),
        checks=(
            Check(
                "3P+1D does more than vLLM one by one at each length",
                all(by[MOONCAKE].by_both > by[ONE_BY_ONE].by_both for by in found.values()),
            ),
            Check(
                "2P+2D also does",
                all(by[BALANCED].by_both > by[ONE_BY_ONE].by_both for by in found.values()),
            ),
            Check(
                "3P+1D also does more than vLLM with batches",
                all(by[MOONCAKE].by_both > by[VLLM].by_both for by in found.values()),
            ),
            Check(
                "3P+1D is held by TTFT at each length, not by TBT",
                all(by[MOONCAKE].by_both == by[MOONCAKE].by_ttft for by in found.values()),
            ),
        ),
        notes=NOTES,
        panels=(panel(found, "Simulated prompts"),),
    )
