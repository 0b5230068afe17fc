"""How far a forecast was from what came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LATENCIES = ("ttft_s", "tbt_s")


def forecast_errors(forecast: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, float]:
    """Relative errors of latencies, forecast over measured less 1; differences of shares. Figures
    without a value on both sides, and latencies of nobody, are left out."""
    errors: dict[str, float] = {}
    for name in LATENCIES:
        for share, expected in forecast[name].items():
            came = measured[name][share]
            if expected is not None and came:
                errors[f"{name}.{share}"] = round(expected / came - 1.0, 6)
    for name in ("hit_ratio", "effective_share"):
        errors[name] = round(forecast[name] - measured[name], 6)
    return errors
