"""The configuration of service levels."""

from __future__ import annotations

from typing import Annotated

from moonpool.config.schema import about
from moonpool.types import Slo, Struct

ASSUMED_TTFT_S = 30.0
ASSUMED_TBT_S = 0.5


class SloConfig(Struct, frozen=True):
    """The service levels of requests without one of their own. Nothing is refused for a level that
    is not set. In its place, 30 s and 0.5 s are a yardstick for placement, chunks and reports."""

    ttft_s: (
        Annotated[
            float,
            about("Service level for the time to first token, in seconds.", "--slo-ttft", gt=0),
        ]
        | None
    ) = None
    tbt_s: (
        Annotated[
            float,
            about("Service level for the time between tokens, in seconds.", "--slo-tbt", gt=0),
        ]
        | None
    ) = None

    @property
    def usual(self) -> Slo:
        """The levels of a request without one of its own, stated or assumed."""
        return Slo(
            ttft_s=ASSUMED_TTFT_S if self.ttft_s is None else self.ttft_s,
            tbt_s=ASSUMED_TBT_S if self.tbt_s is None else self.tbt_s,
            ttft_stated=self.ttft_s is not None,
            tbt_stated=self.tbt_s is not None,
        )
