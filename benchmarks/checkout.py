"""The root of the checkout: processes that run a module of `benchmarks` start in it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
