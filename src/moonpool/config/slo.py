"""The configuration of service levels."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from moonpool.config.schema import about
from moonpool.types import Slo, Struct

ASSUMED_TTFT_S = 30.0
ASSUMED_TBT_S = 0.5
DEFAULT_CLASS = "default"
"""Names the levels of requests without a class. A request that names it leaves its tenant's."""
MAX_CLASSES = 64
"""Each class has separate series in `/metrics`."""


class SloClass(Struct, frozen=True):
    """The service levels of a class of requests: requests that name it (by the header
    `x-slo-class`, or in `slo_class` of a trace's row), or whose tenant has its name."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    ttft_s: Annotated[float, Meta(gt=0)]
    tbt_s: Annotated[float, Meta(gt=0)]

    @property
    def slo(self) -> Slo:
        return Slo(ttft_s=self.ttft_s, tbt_s=self.tbt_s, class_name=self.name)


class SloConfig(Struct, frozen=True):
    """The service levels of requests without one of their own. No request is refused for a level
    that is not set. In place of a missing level, 30 s and 0.5 s are a yardstick for placement,
    chunks and reports."""

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
            " A request names its class by the header `x-slo-class`, a row of a trace in"
            " `slo_class`, or either by its tenant.",
            "--slo-class",
            metavar="NAME=TTFT,TBT",
        ),
    ] = ()

    def class_of(self, slo_class: str, tenant: str) -> SloClass | None:
        """Returns the class that a request's row names, or the class of its tenant. None means the
        default SLOs."""
        if not self.classes or slo_class == DEFAULT_CLASS:
            return None
        named = {one.name: one for one in self.classes}
        return named.get(slo_class) or named.get(tenant)

    def slo_of(self, slo_class: str, tenant: str) -> Slo:
        """Returns the SLOs of a request from the class that it names. `class_name` says which
        levels these are, if there are classes."""
        found = self.class_of(slo_class, tenant)
        if found is not None:
            return found.slo
        return replace(self.usual, class_name=DEFAULT_CLASS) if self.classes else self.usual

    def has(self, name: str) -> bool:
        """Whether a request may name this class."""
        return name == DEFAULT_CLASS or any(one.name == name for one in self.classes)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Returns all values of `Slo.class_name`, if there are classes."""
        return (*(one.name for one in self.classes), DEFAULT_CLASS) if self.classes else ()

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
