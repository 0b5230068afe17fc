"""Draws the time between tokens over requests at once, a line for each number of workers, over
what the instance's own full memory took beside each point."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Line = tuple[str, Sequence[tuple[int, float]]]
"""What it stands for, and (requests, times the full memory's)."""


def plot_offload(lines: Sequence[Line], limit_s: float, title: str, path: Path) -> None:
    """`limit_s`: what a full memory takes. Writes a PNG. Raises OSError."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.set_title(title, fontsize=12)
    for label, points in lines:
        axis.plot([x for x, _ in points], [y for _, y in points], ".-", label=label)
    full = f"the instance's own full memory ({1e3 * limit_s:.1f} ms)"
    axis.axhline(1.0, color="#888888", linestyle="--", label=full)
    axis.set(xlabel="requests at once", ylabel="time between tokens, times", ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    figure.savefig(path, format="png", dpi=120)
