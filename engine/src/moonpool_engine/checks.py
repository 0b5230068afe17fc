"""The checks of the kernels in `moonpool doctor`. This module imports no torch."""

from __future__ import annotations

from moonpool.protocol.machine_check import MachineCheck
from moonpool_engine.engine.native.build import (
    BUILD_LINE,
    NO_ISA,
    best_isa,
    find_library,
    open_library,
    usable_isas,
)


def checks() -> list[MachineCheck]:
    """The instruction set that the kernels here would use."""
    path, library = find_library(), open_library()
    if path is None or library is None:
        found = "not built" if path is None else "do not load"
        advice = f"plain torch computes, slowly: with a C++ compiler, {BUILD_LINE}"
        return [MachineCheck(name="kernels", found=found, advice=advice)]
    best, usable = best_isa(library), usable_isas(library)
    if not usable:
        advice = f"built for another CPU: {BUILD_LINE}" if best else NO_ISA
        return [MachineCheck(name="kernels", found="none for this CPU", advice=advice)]
    is_best = usable[-1] == best
    advice = "" if is_best else f"this CPU has {best}: {BUILD_LINE}"
    return [MachineCheck(name="kernels", found=f"built, for {', '.join(usable)}", advice=advice)]
