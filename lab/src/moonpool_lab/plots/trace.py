"""The plot of `trace info --plot`: load, lengths, popularity of blocks, and time until reuse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from moonpool.distributions import nearest_rank
from moonpool.trace.statistics import TraceStatistics
from moonpool_lab.plots.style import BLUE, ORANGE, SOFT, drawing

_MAX_POINTS = 2_000
_MAX_WINDOWS = 400
_MIN_GAP_S = 0.1


def plot_character(character: TraceStatistics, title: str, path: Path) -> None:
    """Writes the plot as a PNG file. Raises OSError."""
    num_lines = 2 if character.references else 1  # traces without hashes have only two panels
    with drawing(path, 11, 3.75 * num_lines) as figure:
        figure.suptitle(title)
        axes = figure.subplots(num_lines, 2, squeeze=False)
        _arrivals(axes[0][0], character)
        _lengths(axes[0][1], character)
        if character.references:
            _popularity(axes[1][0], character)
            _reuse(axes[1][1], character)


def _arrivals(axis: Axes, character: TraceStatistics) -> None:
    width = 1
    last = max(character.arrivals_per_window)
    while (last + 1) / width > _MAX_WINDOWS:
        width *= 2
    window_s = character.window_s * width
    counts = [0] * ((last // width) + 1)
    for number, count in character.arrivals_per_window.items():
        counts[number // width] += count
    whole = counts[:-1] or counts  # the last window is usually partial
    minutes = [(number + 0.5) * window_s / 60 for number in range(len(whole))]
    axis.plot(minutes, [count / window_s for count in whole], color=BLUE, linewidth=1)
    mean = sum(whole) / len(whole) / window_s
    axis.axhline(mean, color=ORANGE, linestyle="--", label=f"mean {mean:.3g}/s")
    axis.set(
        title=f"Arrivals, per {window_s} s",
        xlabel="time from start (min)",
        ylabel="requests per second",
        ylim=(0, None),
    )
    axis.legend()


def _lengths(axis: Axes, character: TraceStatistics) -> None:
    for values, name, colour in (
        (character.input_tokens, "input", BLUE),
        (character.output_tokens, "output", ORANGE),
    ):
        x, y = _cumulative(values)
        mean = sum(values) / len(values)
        axis.plot(x, y, color=colour, label=f"{name}, mean {mean:,.0f}")
    axis.set(title="Lengths, cumulative", xlabel="tokens", ylabel="share of requests", xscale="log")
    axis.set_ylim(0, 1.02)
    axis.legend()


def _popularity(axis: Axes, character: TraceStatistics) -> None:
    axis.set(title="Popularity of prompt blocks", xlabel="rank of block", ylabel="references")
    ranked = sorted(character.references.values(), reverse=True)
    places = _log_places(len(ranked))
    axis.plot([place + 1 for place in places], [ranked[p] for p in places], ".-", color=BLUE)
    axis.set(xscale="log", yscale="log")
    once = sum(count == 1 for count in ranked) / len(ranked)
    _note(axis, f"{once:.1%} of {len(ranked):,} blocks\nare used once")


def _reuse(axis: Axes, character: TraceStatistics) -> None:
    axis.set(
        title="Time until a block is used again",
        xlabel=f"seconds (less than {_MIN_GAP_S} drawn there)",
        ylabel="share of re-uses",
    )
    gaps = [max(_MIN_GAP_S, gap) for gap in character.reuse_gaps_s]
    if not gaps:
        _nothing(axis, "no block is used again")
        return
    x, y = _cumulative(gaps)
    axis.plot(x, y, color=BLUE)
    axis.set_xscale("log")
    axis.set_ylim(0, 1.02)
    median = nearest_rank(sorted(gaps), 0.5)
    axis.axvline(median, color=ORANGE, linestyle="--", label=f"median {median:,.3g} s")
    axis.legend()


def _cumulative(values: Sequence[float]) -> tuple[list[float], list[float]]:
    ranked = sorted(values)
    step = max(1, len(ranked) // _MAX_POINTS)
    places = [*range(0, len(ranked) - 1, step), len(ranked) - 1]
    return [ranked[place] for place in places], [(place + 1) / len(ranked) for place in places]


def _log_places(count: int) -> list[int]:
    places = {min(count, round(10 ** (step / 20))) - 1 for step in range(200)}
    return sorted(places)


def _nothing(axis: Axes, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", color=SOFT, transform=axis.transAxes)
    axis.set(xticks=[], yticks=[])


def _note(axis: Axes, text: str) -> None:
    axis.text(0.97, 0.95, text, ha="right", va="top", color=SOFT, transform=axis.transAxes)
