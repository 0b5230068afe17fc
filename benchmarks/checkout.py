"""The root of the checkout, in which processes that run a module of `benchmarks` start."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
