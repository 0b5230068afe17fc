"""Plots of `moonpool profile --plot` and of the attention benchmark, as PNG files (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moonpool.cost.fitted import Profile

Line = tuple[str, Sequence[tuple[int, float]]]
"""(label, points of (concurrent requests, ratio to the full local memory))."""
_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d9822b", "#888888"


def plot_curve(profile: Profile, title: str, path: Path) -> None:
    """Draws throughput and step time over the chunk size, with the recommended sizes.

    Raises OSError if the file cannot be written.
    """
    figure = Figure(figsize=(11, 4), layout="constrained")
    figure.suptitle(title, fontsize=13)
    rate_axis, time_axis = figure.subplots(1, 2)
    sizes = sorted(profile.step_s_by_tokens)
    seconds = [profile.step_s_by_tokens[size] for size in sizes]
    rates = [size / time_s for size, time_s in zip(sizes, seconds, strict=True)]
    rate_axis.plot(sizes, rates, ".-", color=_BLUE)
    label = f"saturated at {profile.saturation_tokens}"
    rate_axis.axvline(profile.saturation_tokens, color=_ORANGE, linestyle="--", label=label)
    rate_axis.set(title="Prefill throughput", ylabel="tokens/s", ylim=(0, None))
    time_axis.plot(sizes, seconds, ".-", color=_BLUE, label="measured, the chunk alone")
    for choice in profile.chunks:
        time_axis.plot([choice.chunk_tokens], [choice.step_s], "o", color=_ORANGE)
        text = f" TBT {choice.tbt_s:g} s: {choice.chunk_tokens}"
        time_axis.annotate(text, (choice.chunk_tokens, choice.step_s), color=_GREY, fontsize=8)
    if profile.chunks:
        first = profile.chunks[0]
        label = f"recommended, with {first.decodes} decodes of {first.context_tokens}"
        time_axis.plot([], [], "o", color=_ORANGE, label=label)
    time_axis.set(title="Step time", ylabel="seconds", yscale="log")
    for axis in (rate_axis, time_axis):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("chunk (tokens)")
        _finish(axis)
    _save(figure, path)


def plot_offload(lines: Sequence[Line], limit_s: float, title: str, path: Path) -> None:
    """Draws the time between tokens over concurrent requests, one line per number of workers.

    Times are relative to `limit_s`, the time with the instance's own full memory. Raises OSError if
    the file cannot be written.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    axis.set_title(title, fontsize=12)
    for label, points in lines:
        axis.plot([x for x, _ in points], [y for _, y in points], ".-", label=label)
    full = f"the instance's own full memory ({1e3 * limit_s:.1f} ms)"
    axis.axhline(1.0, color=_GREY, linestyle="--", label=full)
    axis.set(xlabel="requests at once", ylabel="time between tokens, times", ylim=(0, None))
    _finish(axis)
    _save(figure, path)


def _finish(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png", dpi=120)
