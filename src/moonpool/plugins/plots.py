"""Drawings, which need a package that nothing else needs: entry points of the group
`moonpool.plots`."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.plugins.entry_points import entry_points, load

GROUP = "moonpool.plots"
PACKAGE = "moonpool_lab"


def plot_function(name: str) -> Callable[..., None]:
    """The function that draws figures of this kind and writes them to a file. Raises
    ModuleNotFoundError, of which the command makes one line, where it is absent."""
    points = entry_points(GROUP)
    if name not in points:
        raise ModuleNotFoundError(name=PACKAGE)
    found: Callable[..., None] = load(points[name])
    return found
