"""The profile of a generated workload: distributions and shares, stored as JSON."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import msgspec

from moonpool.distributions import interpolated
from moonpool.trace.row import TraceError
from moonpool.types import MALFORMED, Struct

PROBABILITIES = (
    *(0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65),
    *(0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995, 0.998, 1.0),
)
"""The probabilities of quantile tables: finer at the long end, where most tokens are."""

CLASS_TOKENS = (512, 2048, 8192, 16384, 32768, 65536)
"""Bounds of the length classes: short prompts have no full block of their own, long ones are cut.
The class of a prompt is the number of bounds that its tokens without the shared part reach."""
NUM_CLASSES = len(CLASS_TOKENS) + 1

Quantiles = tuple[float, ...]
"""A distribution by its quantiles at PROBABILITIES, linear between them; one value means that all
are equal."""


class SharedPrompts(Struct, frozen=True):
    """System prompts or documents that many sessions start with, in whole blocks.

    A first prompt has one with probability `share`. The weight of the r-th most popular of `count`
    is 1 / r ** `skew` (Zipf). `tokens` is the distribution of the lengths of these prompts.
    """

    share: float
    count: int
    skew: float
    tokens: Quantiles


class ToolCalls(Struct, frozen=True):
    """Turns that call a tool: a short answer, then soon a turn with the result of the tool."""

    share: float  # of turns
    gap_s: Quantiles
    output_tokens: Quantiles
    result_tokens: Quantiles


class Branches(Struct, frozen=True):
    """Follow-ups that keep only a prefix of the previous prompt: edits, or histories that were cut
    because they grew too long."""

    class_share: tuple[float, ...]  # share of follow-ups by length class of the previous prompt
    kept_share: Quantiles  # share of the previous prompt's full blocks that a follow-up keeps
    new_share: Quantiles  # new tokens of a follow-up, relative to the tokens that it cuts off


class GeneratorProfile(Struct, frozen=True):
    """One kind of workload.

    `burst_short_cv2` and `burst_long_cv2` are the squared coefficients of variation of the two
    factors of the arrival rate, which change every 10 s and every 300 s; 0 is a Poisson process.
    `first_tokens` is the length of a first prompt without its shared part. A first turn has a next
    one with the probability `first_continue_share` of its length class, the k-th later turn with
    `continue_share[k - 1]`; the last value holds for all later turns. `message_tokens` is the
    length that a follow-up adds to the previous prompt and answer. `repeat_share` is the share of
    follow-ups that repeat the previous prompt. `closed_loop`: whether its sessions are programs,
    whose next turn waits for the previous answer.
    """

    name: str
    rate_rps: float
    first_tokens: Quantiles
    output_tokens: Quantiles
    max_input_tokens: int
    has_hashes: bool = True
    burst_short_cv2: float = 0.0
    burst_long_cv2: float = 0.0
    shared: SharedPrompts | None = None
    first_continue_share: tuple[float, ...] = (0.0,) * NUM_CLASSES
    continue_share: tuple[float, ...] = (0.0,)
    gap_s: Quantiles = (60.0,)
    message_tokens: Quantiles = (1.0,)
    repeat_share: float = 0.0
    branches: Branches | None = None
    tools: ToolCalls | None = None
    closed_loop: bool = False


class MixComponent(Struct, frozen=True):
    """A profile, and its rate in equal parts of the day as factors of the profile's own rate."""

    profile: GeneratorProfile
    by_hour: tuple[float, ...]


class Mix(Struct, frozen=True):
    """Several workloads at once, with shares that change over a day of `day_s` seconds."""

    name: str
    day_s: float
    kinds: tuple[MixComponent, ...]

    @property
    def rate_rps(self) -> float:
        """Returns the mean rate of a day."""
        return sum(
            kind.profile.rate_rps * sum(kind.by_hour) / len(kind.by_hour) for kind in self.kinds
        )


def quantiles_of(values: Sequence[float], digits: int = 0) -> Quantiles:
    """The quantile table of `values`; one value if all are equal."""
    ranked = sorted(values)
    if ranked[0] == ranked[-1]:
        return (round(float(ranked[0]), digits),)
    return tuple(round(float(interpolated(ranked, share)), digits) for share in PROBABILITIES)


def length_class(own_tokens: int) -> int:
    """The length class of a prompt with `own_tokens` without its shared part."""
    return bisect_right(CLASS_TOKENS, own_tokens)


def share_below(table: Quantiles, value: float) -> float:
    """The probability that a sample is below `value`."""
    if len(table) == 1:
        return float(table[0] < value)
    for number in range(1, len(table)):
        if table[number] >= value:
            low, high = table[number - 1], table[number]
            part = (value - low) / (high - low) if value > low else 0.0
            step = PROBABILITIES[number] - PROBABILITIES[number - 1]
            return PROBABILITIES[number - 1] + step * part
    return 1.0


def read_profile(path: Path) -> GeneratorProfile:
    """Reads a profile from JSON. Raises TraceError if it cannot be read or used."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=GeneratorProfile)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    except MALFORMED as error:
        words = " ".join(str(error).split())  # a key of the file may hold line breaks
        raise TraceError(f"{path} is not a generator profile: {words}") from None
    try:
        check_profile(profile)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    return profile


def write_profile(profile: GeneratorProfile, path: Path) -> None:
    """Writes a profile as JSON. Raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")


def check_profile(profile: GeneratorProfile) -> None:
    """Raises TraceError if no workload can be generated from the profile."""
    _require(isfinite(profile.rate_rps) and profile.rate_rps > 0, "rate_rps must be above 0")
    _require(profile.max_input_tokens > 0, "max_input_tokens must be above 0")
    _require(len(profile.continue_share) > 0, "continue_share is empty; give at least one value")
    shares = [*profile.continue_share, *profile.first_continue_share, profile.repeat_share]
    by_class = {"first_continue_share": profile.first_continue_share}
    tables = {name: getattr(profile, name) for name in _TABLES}
    for number in (profile.burst_short_cv2, profile.burst_long_cv2):
        _require(isfinite(number) and number >= 0, "burst_*_cv2 must be 0 or more")
    if profile.shared is not None:
        shares.append(profile.shared.share)
        _require(profile.shared.count > 0, "shared.count must be above 0")
        tables["shared.tokens"] = profile.shared.tokens
    if profile.branches is not None:
        shares.extend(profile.branches.class_share)
        by_class["branches.class_share"] = profile.branches.class_share
        tables["branches.kept_share"] = profile.branches.kept_share
        tables["branches.new_share"] = profile.branches.new_share
    if profile.tools is not None:
        shares.append(profile.tools.share)
        tables["tools.gap_s"] = profile.tools.gap_s
        tables["tools.output_tokens"] = profile.tools.output_tokens
        tables["tools.result_tokens"] = profile.tools.result_tokens
    _require(all(0 <= share <= 1 for share in shares), "shares must be between 0 and 1")
    for name, values in by_class.items():
        _require(len(values) == NUM_CLASSES, f"{name} must have {NUM_CLASSES} values")
    for name, table in tables.items():
        valid = len(table) in (1, len(PROBABILITIES)) and list(table) == sorted(table)
        valid = valid and all(isfinite(value) for value in table) and table[0] >= 0
        _require(
            valid,
            f"{name} must be one value, or {len(PROBABILITIES)} rising values of 0 or more",
        )


_TABLES = ("first_tokens", "output_tokens", "gap_s", "message_tokens")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise TraceError(message)
