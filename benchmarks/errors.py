"""The error of all benchmarks."""

from __future__ import annotations


class BenchError(RuntimeError):
    """The run did not measure what it should; one line says why."""
