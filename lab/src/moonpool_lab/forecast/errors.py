"""Computes how far a forecast was from the measured figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LATENCIES = ("ttft_s", "tbt_s")


def forecast_errors(forecast: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, float]:
    """Returns the relative errors of latencies (forecast / measured - 1) and the differences of
    shares. Leaves out figures that lack a value on one side, and latencies without requests."""
    errors: dict[str, float] = {}
    for name in LATENCIES:
        for share, expected in forecast[name].items():
            came = measured[name][share]
            if expected is not None and came:
                errors[f"{name}.{share}"] = round(expected / came - 1.0, 6)
    for name in ("hit_ratio", "effective_share"):
        errors[name] = round(forecast[name] - measured[name], 6)
    return errors
