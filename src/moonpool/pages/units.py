"""Numbers as text: three significant digits, and a unit that fits the size."""

from __future__ import annotations

from math import isfinite

GAP = "\u00a0"  # keeps a unit with its number

_BYTES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def significant(value: float, digits: int = 3) -> str:
    """`12,031`, `15.3`, `0.0292`: never in scientific notation unless it is tiny."""
    if not isfinite(value):
        return "unlimited" if value > 0 else "-"
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")
    size = abs(rounded)
    if size < 1e-4:
        return f"{rounded:.{digits}g}"
    decimals = digits
    while size >= 1 and decimals:
        size /= 10
        decimals -= 1
    text = f"{rounded:,.{decimals}f}" if abs(rounded) >= 1 else f"{rounded:.{digits + 3}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def whole(value: float) -> str:
    """`12,031`."""
    return f"{value:,.0f}"


def counted(number: int, noun: str) -> str:
    """Returns a count with its unit: `1 request`, `12,031 requests`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """Formats a share with one decimal; only a share of exactly 0 or 1 reads `0 %` or `100 %`."""
    if share <= 0:
        return f"0{GAP}%"
    if share < 0.0005:
        return f"under 0.1{GAP}%"
    if share == 1:
        return f"100{GAP}%"
    if 0.9995 <= share < 1:
        return f"over 99.9{GAP}%"
    return f"{share * 100:.1f}{GAP}%"


def given_percent(share: float) -> str:
    """Formats a share that somebody gave, with all of its digits: `90%`, `99.95%`."""
    return f"{100 * share:.6g}%"


def duration(seconds: float) -> str:
    """Formats a duration in the unit that leaves one to three digits before the point, for example
    `31.4 ms`."""
    size = abs(seconds)
    if size == 0:
        return f"0{GAP}s"
    if size < 0.9995e-3:
        return f"{significant(seconds * 1e6)}{GAP}µs"
    if size < 0.9995:
        return f"{significant(seconds * 1e3)}{GAP}ms"
    if size < 120:
        return f"{significant(seconds)}{GAP}s"
    if size < 7200:
        return f"{significant(seconds / 60)}{GAP}min"
    return f"{significant(seconds / 3600)}{GAP}h"


def byte_size(num_bytes: float) -> str:
    """Returns a size such as `39.5 TB`, in powers of 1000."""
    for unit, name in _BYTES:
        if num_bytes >= unit:
            return f"{significant(num_bytes / unit)}{GAP}{name}"
    return f"{significant(num_bytes)}{GAP}B"


def short_count(value: float) -> str:
    """Returns a count such as `13.7 M`, for axes and bars."""
    for unit, name in _COUNTS:
        if abs(value) >= unit:
            return f"{significant(value / unit)}{GAP}{name}"
    return significant(value)


def joined(names: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
