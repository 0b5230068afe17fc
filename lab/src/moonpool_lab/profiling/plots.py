"""Draws the plots of `moonpool profile --plot` and of the attention benchmark, as PNG files
(matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from moonpool.cost.fitted import Profile
from moonpool_lab.plots.style import BLUE, ORANGE, SOFT, drawing

Line = tuple[str, Sequence[tuple[int, float]]]
"""A line of the plot: its label, and points of (concurrent requests, time over `limit_s`)."""


def plot_curve(profile: Profile, title: str, path: Path) -> None:
    """Draws throughput and step time over the chunk size, with the recommended sizes.

    Raises OSError if the file cannot be written.
    """
    with drawing(path, 11, 4) as figure:
        figure.suptitle(title)
        rate_axis, time_axis = figure.subplots(1, 2)
        _rates(rate_axis, profile)
        _step_times(time_axis, profile)
        for axis in (rate_axis, time_axis):
            axis.set_xscale("log", base=2)
            axis.set_xlabel("chunk (tokens)")
            axis.legend()


def _rates(axis: Axes, profile: Profile) -> None:
    sizes = sorted(profile.step_s_by_tokens)
    axis.plot(sizes, [size / profile.step_s_by_tokens[size] for size in sizes], ".-", color=BLUE)
    label = f"saturated at {profile.saturation_tokens}"
    axis.axvline(profile.saturation_tokens, color=ORANGE, linestyle="--", label=label)
    axis.set(title="Prefill throughput", ylabel="tokens/s", ylim=(0, None))


def _step_times(axis: Axes, profile: Profile) -> None:
    sizes = sorted(profile.step_s_by_tokens)
    seconds = [profile.step_s_by_tokens[size] for size in sizes]
    axis.plot(sizes, seconds, ".-", color=BLUE, label="measured, the chunk alone")
    for choice in profile.chunks:
        axis.plot([choice.chunk_tokens], [choice.step_s], "o", color=ORANGE)
        text = f" TBT {choice.tbt_s:g} s: {choice.chunk_tokens}"
        axis.annotate(text, (choice.chunk_tokens, choice.step_s), color=SOFT, fontsize=8)
    if profile.chunks:
        first = profile.chunks[0]
        label = f"recommended, with {first.decodes} decodes of {first.context_tokens}"
        axis.plot([], [], "o", color=ORANGE, label=label)
    axis.set(title="Step time", ylabel="seconds", yscale="log")


def plot_offload(lines: Sequence[Line], limit_s: float, title: str, path: Path) -> None:
    """Draws the time between tokens over concurrent requests, one line per number of workers.

    Times are relative to `limit_s`, the time with the instance's own full memory. Raises OSError if
    the file cannot be written.
    """
    with drawing(path, 7, 4.5) as figure:
        axis = figure.subplots()
        axis.set_title(title)
        for label, points in lines:
            axis.plot([x for x, _ in points], [y for _, y in points], ".-", label=label)
        full = f"the instance's own full memory ({1e3 * limit_s:.1f} ms)"
        axis.axhline(1.0, color=SOFT, linestyle="--", label=full)
        axis.set(xlabel="requests at once", ylabel="time between tokens, times", ylim=(0, None))
        axis.legend()
