"""Where a head serves, and what it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Standing = Literal["leads", "stands by", "starts"]


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """Where a head serves clients, and where workers join it."""

    url: str
    host: str
    port: int
