"""Runs a benchmark for a command: errors are one line, and figures have their origin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.errors import BenchError
from moonpool.cli.output import check_folders, one_line, show_figures
from moonpool_lab.cli.measurement import run_measurement


def measure(run: Callable[[], dict[str, Any]], json_file: str | None) -> dict[str, Any]:
    """Runs the benchmark, writes its figures, and returns them. Ends the command for an error that
    a user can mend."""
    from moonpool.text.model_error import ModelError
    from moonpool_engine.attention_offload.client import AttentionError
    from moonpool_engine.storage.folder import StoreError
    from moonpool_engine.transfer.arena import ArenaError

    with one_line(ArenaError, AttentionError, BenchError, ModelError, StoreError):
        return run_measurement(run, json_file)


def show(run: Callable[[], dict[str, Any]], json_file: str | None) -> None:
    """Measures as `measure` does, and prints the figures."""
    check_folders(json_file)
    show_figures(measure(run, None), json_file)
