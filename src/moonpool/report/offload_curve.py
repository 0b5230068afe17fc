"""Draws the time between tokens over requests at once, a line for each number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Line = tuple[str, Sequence[tuple[int, float]]]
"""What it stands for, and (requests, seconds)."""


def plot_offload(lines: Sequence[Line], limit_s: float, title: str, path: Path) -> None:
    """Writes a PNG. Raises OSError."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.set_title(title, fontsize=12)
    for label, points in lines:
        axis.plot([x for x, _ in points], [1e3 * y for _, y in points], ".-", label=label)
    axis.axhline(1e3 * limit_s, color="#888888", linestyle="--", label="a full memory of its own")
    axis.set(xlabel="requests at once", ylabel="time between tokens (ms)", ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    figure.savefig(path, format="png", dpi=120)
