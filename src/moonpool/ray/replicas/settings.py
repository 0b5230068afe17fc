"""The settings of a Conductor for a Serve deployment: `request_router_kwargs`, all optional."""

from __future__ import annotations

from moonpool.config.slo import SloConfig
from moonpool.config.tables import Admission, ConductorConfig, Placement
from moonpool.types import Slo, Struct


class RouterSettings(Struct, frozen=True):
    """`ttft_s`, `tbt_s`: the service levels; no call is refused for a level that is not set.
    `kv_tokens`: the number of tokens that one replica's KVCache holds. `max_model_tokens`: the
    limit for prompt and answer together. `default_max_tokens`: the limit of a call that states
    none. `timeout_s`: how many seconds a call may wait for room before it is refused, and how long
    after its last sign (its sending, or tokens that came) a running one is no longer counted."""

    ttft_s: float | None = None
    tbt_s: float | None = None
    kv_tokens: int = 262_144
    block_tokens: int = 16
    max_model_tokens: int = 131_072
    default_max_tokens: int = 1024
    timeout_s: float = 600.0
    placement: Placement = "kvcache-centric"
    admission: Admission = "goodput"

    @property
    def slo(self) -> Slo:
        return SloConfig(ttft_s=self.ttft_s, tbt_s=self.tbt_s).usual

    @property
    def conductor(self) -> ConductorConfig:
        """The Conductor's table: a replica neither sizes chunks nor takes over blocks."""
        return ConductorConfig(
            placement=self.placement,
            admission=self.admission,
            inline_chunks=False,
            prefetch=False,
            spare_copies_first=False,
        )
