"""moonpool: KVCache-centric, disaggregated LLM serving.

`import moonpool` is quick and needs nothing but Python. The names below are the public Python API
(docs/python.md). Each loads its modules when it is first used, and none needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "LineError",
    "PlanResult",
    "ResultTable",
    "SimulationResult",
    "TraceError",
    "TraceRow",
    "TraceRows",
    "__version__",
    "plan_cluster",
    "read_trace",
    "report",
    "simulate",
]

_PLACES = {
    "ConfigError": "moonpool.config.tables",
    "LineError": "moonpool.trace.row",
    "PlanResult": "moonpool.studies.planning",
    "ResultTable": "moonpool.studies.result_table",
    "SimulationResult": "moonpool.studies.simulation_result",
    "TraceError": "moonpool.trace.row",
    "TraceRow": "moonpool.trace.row",
    "TraceRows": "moonpool.studies.trace_rows",
    "plan_cluster": "moonpool.studies.planning",
    "read_trace": "moonpool.studies.trace_rows",
    "report": "moonpool.studies.calls",
    "simulate": "moonpool.studies.calls",
}

if TYPE_CHECKING:
    from moonpool.config.tables import ConfigError
    from moonpool.studies.calls import report, simulate
    from moonpool.studies.planning import PlanResult, plan_cluster
    from moonpool.studies.result_table import ResultTable
    from moonpool.studies.simulation_result import SimulationResult
    from moonpool.studies.trace_rows import TraceRows, read_trace
    from moonpool.trace.row import LineError, TraceError, TraceRow


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'moonpool' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
