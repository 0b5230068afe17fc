"""Draws how throughput and step time depend on the chunk, with what is recommended."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moonpool.cost.profile import Profile

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d9822b", "#888888"


def plot_curve(profile: Profile, title: str, path: Path) -> None:
    """Writes a PNG. Raises OSError."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13)
    rate_axis, time_axis = figure.subplots(1, 2)
    sizes = sorted(profile.step_s_by_tokens)
    seconds = [profile.step_s_by_tokens[size] for size in sizes]
    rates = [size / time_s for size, time_s in zip(sizes, seconds, strict=True)]
    rate_axis.plot(sizes, rates, ".-", color=_BLUE)
    label = f"saturated at {profile.saturation_tokens}"
    rate_axis.axvline(profile.saturation_tokens, color=_ORANGE, linestyle="--", label=label)
    rate_axis.set(title="Prefill throughput", ylabel="tokens/s", ylim=(0, None))
    rate_axis.legend(frameon=False)
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
    time_axis.legend(frameon=False)
    for axis in (rate_axis, time_axis):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("chunk (tokens)")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, format="png", dpi=120)
