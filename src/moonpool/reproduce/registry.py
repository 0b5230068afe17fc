"""The experiments by name. Each is a module with one function `run(options) -> Finding`, imported
only when it runs."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass

from moonpool.reproduce.finding import Finding
from moonpool.reproduce.options import ExperimentError, Options


@dataclass(frozen=True, slots=True)
class Experiment:
    module: str
    source: str
    title: str
    trace: str = ""  # the name of the trace it needs, if any


EXPERIMENTS = {
    "sarathi-decode-maximal": Experiment(
        "sarathi_decode_maximal",
        "SARATHI Tables 2-4, Figs 7, 8, 13",
        "Decodes that ride on prefill chunks",
    ),
    "sarathi-pipeline-bubbles": Experiment(
        "sarathi_pipeline_bubbles",
        "SARATHI, GPT-3 with pipelines",
        "Pipeline bubbles with whole prompts and with chunks",
    ),
    "sarathi-serve-budgets": Experiment(
        "sarathi_serve_budgets",
        "Sarathi-Serve section 4.3, Tables 1-4",
        "Token budgets: what they take, and what they do",
    ),
}


def find(name: str) -> Experiment:
    """Raises ExperimentError, naming the nearest known one."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    close = difflib.get_close_matches(name.lower(), list(EXPERIMENTS), n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else "see `moonpool reproduce --list`"
    raise ExperimentError(f"unknown experiment {name!r}; {hint}")


def run(name: str, options: Options) -> Finding:
    """Raises ExperimentError: unknown name, missing trace."""
    module = importlib.import_module(f"moonpool.reproduce.{find(name).module}")
    finding: Finding = module.run(options)
    assert finding.name == name
    return finding
