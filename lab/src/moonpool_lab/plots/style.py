"""Gives all drawings by matplotlib the colours and lines of the pages.

The colours are read from the pages' style sheet, so a drawing looks as a page does. The font is the
font that matplotlib includes, so that the same run draws the same bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cycler import cycler
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moonpool.pages import colours

_PAGE = colours()
BLUE, ORANGE, GREEN, RED, GREY = SERIES = tuple(_PAGE[f"c{number}"] for number in range(1, 6))
SOFT = _PAGE["soft"]
_LOOK: dict[Any, Any] = {
    "figure.facecolor": _PAGE["card"],
    "axes.facecolor": _PAGE["card"],
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.titlecolor": _PAGE["ink"],
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=SERIES),
    "figure.titlesize": 13,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": _PAGE["rule"],
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.7,
    "text.color": _PAGE["ink"],
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "svg.hashsalt": "moonpool",
}
_STAMPS = {".svg": "Date", ".pdf": "CreationDate"}
_DPI = 120


@contextmanager
def drawing(path: Path, width_inches: float, height_inches: float) -> Iterator[Figure]:
    """Yields an empty figure, and writes it to `path` when the block has ended. The format follows
    from the file's name; it is PNG if the name has no known ending. Raises OSError."""
    suffix = path.suffix.lower()
    with rc_context(_LOOK):
        figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        kind = suffix[1:] if suffix in _STAMPS else "png"
        stamp = _STAMPS.get(suffix, "Software")
        figure.savefig(path, format=kind, dpi=_DPI, metadata={stamp: None})
