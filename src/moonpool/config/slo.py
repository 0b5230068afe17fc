"""The configuration of service levels."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from moonpool.config.schema import about
from moonpool.types import Slo, Struct

ASSUMED_TTFT_S = 30.0
ASSUMED_TBT_S = 0.5


class SloClass(Struct, frozen=True):
    """The service levels of a class of requests: those of a trace's rows that name the class in
    `slo_class`, or else whose tenant has its name."""

    name: Annotated[str, Meta(min_length=1)]
    ttft_s: Annotated[float, Meta(gt=0)]
    tbt_s: Annotated[float, Meta(gt=0)]

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft_s, self.tbt_s)


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
    classes: Annotated[
        tuple[SloClass, ...],
        about(
            "Classes of requests with service levels of their own: `name`, `ttft_s`, `tbt_s`."
            " `simulate`, `plan` and `replay` read them; a row of the trace names its class in"
            " `slo_class`, or by its tenant.",
            "--slo-class",
            metavar="NAME=TTFT,TBT",
        ),
    ] = ()

    def class_of(self, slo_class: str, tenant: str) -> SloClass | None:
        """The class of a request by what its row names; None: the usual levels hold."""
        named = {one.name: one for one in self.classes}
        return named.get(slo_class) or named.get(tenant)

    @property
    def loosest(self) -> Slo:
        """The longest of all times that any request may take."""
        levels = [self.usual, *(one.slo for one in self.classes)]
        return Slo(max(one.ttft_s for one in levels), max(one.tbt_s for one in levels))

    @property
    def usual(self) -> Slo:
        """The levels of a request without one of its own, stated or assumed."""
        return Slo(
            ttft_s=ASSUMED_TTFT_S if self.ttft_s is None else self.ttft_s,
            tbt_s=ASSUMED_TBT_S if self.tbt_s is None else self.tbt_s,
            ttft_stated=self.ttft_s is not None,
            tbt_stated=self.tbt_s is not None,
        )
