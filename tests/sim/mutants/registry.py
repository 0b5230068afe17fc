"""Holds all mutants: the import of a module of mutants registers them."""

from __future__ import annotations

from tests.sim.mutants import (
    clocks,
    conducting,
    disk,
    real_bytes,
    releases,
    takeovers,
    tenants,
    tokens_and_blocks,
    vllm_servers,
)
from tests.sim.mutants.mutant import MUTANTS

__all__ = [
    "MUTANTS",
    "clocks",
    "conducting",
    "disk",
    "real_bytes",
    "releases",
    "takeovers",
    "tenants",
    "tokens_and_blocks",
    "vllm_servers",
]
