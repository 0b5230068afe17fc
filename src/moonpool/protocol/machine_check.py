"""A line of `moonpool doctor`; packages may add further lines."""

from __future__ import annotations

from moonpool.types import Struct


class MachineCheck(Struct, frozen=True, kw_only=True):
    """What a check found, and what to set; without `advice` all is well."""

    name: str
    found: str
    advice: str = ""
