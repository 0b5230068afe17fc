"""The local cluster of a live benchmark and its simulated twin: one description for both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from moonpool.bench.live_profile import LiveProfile
from moonpool.config import Admission, Config, parse_config
from moonpool.sim.hardware import Hardware, build_hardware
from moonpool.types import Slo, Struct

UNBOUNDED = Slo(ttft_s=1e5, tbt_s=1e5)


class LiveCluster(Struct, frozen=True):
    """What both are started with. The pool's blocks must fit the scaled trace's."""

    model: str = "random:m30"
    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    attention: int = 0
    attention_own_tokens: int = 0
    kv_tokens: int = 65_536
    block_tokens: int = 16
    chunk_tokens: int = 512
    max_sequences: int = 128
    threads: int = 1
    admission: Admission = "early"
    slo: Slo = UNBOUNDED

    def arguments(self) -> list[str]:
        """Of `moonpool serve`."""
        options = {
            "--prefill": self.prefill,
            "--decode": self.decode,
            "--mixed": self.mixed,
            "--attention": self.attention,
            "--attention-own-tokens": self.attention_own_tokens,
            "--kv-tokens": self.kv_tokens,
            "--block-size": self.block_tokens,
            "--max-num-batched-tokens": self.chunk_tokens,
            "--max-num-seqs": self.max_sequences,
            "--threads": self.threads,
            "--admission": self.admission,
            "--slo-ttft": self.slo.ttft_s,
            "--slo-tbt": self.slo.tbt_s,
        }
        return [self.model, *(str(word) for pair in options.items() for word in pair)]

    def config(self, profile: LiveProfile) -> Config:
        """Of the simulation."""
        tables: dict[str, dict[str, Any]] = {
            "cluster": {
                "prefill": self.prefill,
                "decode": self.decode,
                "mixed": self.mixed,
                "attention": self.attention,
            },
            "attention": {"own_tokens": self.attention_own_tokens},
            "pool": {
                "block_tokens": self.block_tokens,
                "dram_tokens_per_instance": profile.num_blocks * profile.block_tokens,
            },
            "engine": {"chunk_tokens": self.chunk_tokens, "max_sequences": self.max_sequences},
            "conductor": {"admission": self.admission},
            "slo": msgspec.to_builtins(self.slo),
            "hardware": {"cost": "profile.json"},
        }
        return parse_config("", tables)

    def hardware(self, profile: LiveProfile) -> Hardware:
        """The truth as measured, the belief as the live Conductor's."""
        hardware = build_hardware(self.config(profile), profile.cost)
        belief = profile.believed
        return replace(
            hardware,
            prefill=replace(hardware.prefill, belief=belief),
            decode=replace(hardware.decode, belief=belief),
            mixed=replace(hardware.mixed, belief=belief),
        )

    def with_(self, **changes: Any) -> LiveCluster:
        changed: LiveCluster = msgspec.structs.replace(self, **changes)
        return changed

    @property
    def words(self) -> str:
        counts = {"P": self.prefill, "D": self.decode, "M": self.mixed, "A": self.attention}
        return "+".join(f"{count}{letter}" for letter, count in counts.items() if count)
