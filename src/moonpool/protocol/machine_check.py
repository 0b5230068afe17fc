"""One line of `moonpool doctor`, which packages may add."""

from __future__ import annotations

from moonpool.types import Struct


class MachineCheck(Struct, frozen=True, kw_only=True):
    """What was found, and what to set; no `advice`: all is well."""

    name: str
    found: str
    advice: str = ""
