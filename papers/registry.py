"""The experiments by name. Each is a module with one function `run(options) -> Finding`, imported
only when it runs."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass

from papers.finding import Finding
from papers.options import ExperimentError, Options


@dataclass(frozen=True, slots=True)
class Experiment:
    module: str
    source: str
    title: str
    trace: str = ""  # the name of the trace it needs, if any


EXPERIMENTS = {
    "sarathi-decode-maximal": Experiment(
        "sarathi.decode_maximal",
        "SARATHI Tables 2-4, Figs 7, 8, 13",
        "Decodes that ride on prefill chunks",
    ),
    "sarathi-pipeline-bubbles": Experiment(
        "sarathi.pipeline_bubbles",
        "SARATHI, GPT-3 with pipelines",
        "Pipeline bubbles with whole prompts and with chunks",
    ),
    "sarathi-serve-budgets": Experiment(
        "sarathi.serve_budgets",
        "Sarathi-Serve section 4.3, Tables 1-4",
        "Token budgets: what they take, and what they do",
    ),
    "sarathi-serve-capacity": Experiment(
        "sarathi.serve_capacity",
        "Sarathi-Serve section 5.1, Figs 10-13",
        "Requests a second within the SLOs, against vLLM and Orca",
    ),
    "mooncake-table1": Experiment(
        "mooncake.table1",
        "Mooncake v3 Table 1",
        "Hit ratio by eviction policy and capacity",
        "conversation",
    ),
    "mooncake-hit-ratio": Experiment(
        "mooncake.hit_ratio",
        "Mooncake FAST'25 Figs 9, 10",
        "Hit ratio by capacity, and local caches against one pool",
        "conversation",
    ),
    "mooncake-prefill-time": Experiment(
        "mooncake.prefill_time",
        "Mooncake FAST'25 Fig. 8",
        "GPU time of a prompt",
        "conversation",
    ),
    "mooncake-placement": Experiment(
        "mooncake.placement",
        "Mooncake FAST'25 Fig. 5",
        "Mean TTFT under four placements",
        "conversation",
    ),
    "mooncake-v3-fig8": Experiment(
        "mooncake.v3_fig8",
        "Mooncake v3 Fig. 8",
        "TTFT under four placements, v3",
    ),
    "mooncake-v3-fig9": Experiment(
        "mooncake.v3_fig9",
        "Mooncake v3 Fig. 9",
        "Loads of both pools with and without prediction",
        "conversation",
    ),
    "mooncake-v3-fig11": Experiment(
        "mooncake.v3_fig11",
        "Mooncake v3 Fig. 11",
        "ArXiv summarisation and L-Eval against vLLM on four nodes",
    ),
    "mooncake-v3-fig12": Experiment(
        "mooncake.v3_fig12",
        "Mooncake v3 Fig. 12",
        "Prompts of 16k to 128k tokens against vLLM on four nodes",
    ),
    "mooncake-v3-fig13": Experiment(
        "mooncake.v3_fig13",
        "Mooncake v3 Fig. 13",
        "The real trace on 10P+10D and on 20 nodes of vLLM",
    ),
    "mooncake-v3-table3": Experiment(
        "mooncake.v3_table3",
        "Mooncake v3 Table 3",
        "Requests rejected in overload",
        "conversation",
    ),
    "mooncake-effective": Experiment(
        "mooncake.effective",
        "Mooncake FAST'25 Figs 1, 6, 7",
        "Requests within a limit on the time between tokens",
        "conversation",
    ),
    "mooncake-replicas": Experiment(
        "mooncake.replicas",
        "Mooncake FAST'25 Fig. 11",
        "Replicas of the most used blocks",
        "conversation",
    ),
    "mooncake-network": Experiment(
        "mooncake.network",
        "Mooncake FAST'25 Fig. 13",
        "Network bandwidth",
    ),
    "mooncake-latency": Experiment(
        "mooncake.latency",
        "Mooncake FAST'25 Fig. 14",
        "One request, phase by phase",
    ),
    "mooncake-layer-wise": Experiment(
        "mooncake.layer_wise",
        "Mooncake v3 Fig. 7",
        "Storing KVCache layer by layer",
    ),
    "mooncake-cpp": Experiment(
        "mooncake.cpp",
        "Mooncake v3 section 5.1",
        "Prefill instances of several nodes",
        "conversation",
    ),
    "mooncake-ratio": Experiment(
        "mooncake.ratio",
        "Mooncake FAST'25 Fig. 15",
        "Prefill and decode nodes out of 16",
    ),
    "mooncake-reuse": Experiment(
        "mooncake.reuse",
        "Mooncake FAST'25 Eq. 1, 2",
        "When reusing a prefix is worth its transfer",
    ),
    "lamina-bandwidth": Experiment(
        "lamina.bandwidth",
        "Lamina Figs 4, 14",
        "The network that attention offloading needs",
    ),
    "lamina-dollars": Experiment(
        "lamina.dollars",
        "Lamina v1, abstract",
        "Tokens per dollar of attention offloading",
    ),
    "lamina-throughput": Experiment(
        "lamina.throughput",
        "Lamina Fig. 10, Tables 4, 5",
        "Attention offloading against one kind of device",
        "azure-conv",
    ),
}


def find(name: str) -> Experiment:
    """Raises ExperimentError for an unknown name; the error names the nearest known experiment."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    close = difflib.get_close_matches(name.lower(), list(EXPERIMENTS), n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else "see `moonpool reproduce --list`"
    raise ExperimentError(f"unknown experiment {name!r}; {hint}")


def run(name: str, options: Options) -> Finding:
    """Raises ExperimentError: unknown name, missing trace."""
    module = importlib.import_module(f"papers.{find(name).module}")
    finding: Finding = module.run(options)
    assert finding.name == name
    if options.quick:
        return finding.as_partial("fewer requests")
    if options.parts:
        return finding.as_partial("; ".join(dict.fromkeys(options.parts)))
    return finding
