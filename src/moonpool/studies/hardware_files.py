"""Reads the files that describe hardware: the catalogue, measured profiles, and beliefs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moonpool.config.tables import Config, ConfigError
from moonpool.types import MALFORMED, Role

if TYPE_CHECKING:
    from moonpool.cost.fitted import FittedCost
    from moonpool.cost.recorded import CostEstimatorRecord
    from moonpool.sim.hardware.catalogue import Catalogue


def read_text_file(path: str | Path, what: str) -> str:
    """Returns a text file's content. Raises ConfigError, which calls the file `what`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {what} {path}: it is not UTF-8 text") from None


def read_catalogue_and_profile(
    config: Config, catalogue_file: str | None
) -> tuple[Catalogue, FittedCost | None]:
    """Opens the catalogue, and the profile if `hardware.cost` names one. Raises ConfigError."""
    from moonpool.cost.fitted import Profile
    from moonpool.sim.hardware.catalogue import BUILT_IN, parse_catalogue

    catalogue = BUILT_IN
    if catalogue_file is not None:
        catalogue = parse_catalogue(read_text_file(catalogue_file, "the catalogue"))
    path, profile = config.hardware.cost, None
    if path.endswith(".json"):
        text = read_text_file(path, "the profile")
        try:
            profile = msgspec.json.decode(text, type=Profile)
        except MALFORMED as error:
            raise ConfigError(
                f"{path} is no profile of `moonpool profile --json`: {error}"
            ) from None
        _check_profile(profile, path)
    return catalogue, profile


def _check_profile(profile: FittedCost, path: str) -> None:
    times = (*profile.prefill, *profile.decode, profile.transfer_latency_s)
    if min(times) < 0:
        raise ConfigError(
            f"{path} holds a negative time: measure it again with `moonpool profile --json`"
        )
    if min(profile.shared_memory_bytes_per_s, profile.network_bytes_per_s) <= 0:
        raise ConfigError(
            f"{path} holds a bandwidth of 0 or less: measure it again with `moonpool profile`"
        )


def read_beliefs(path: str | None) -> CostEstimatorRecord | None:
    """Reads the file that `profile --beliefs` wrote. Raises ConfigError."""
    from moonpool.cost.recorded import RecordError, parse_beliefs

    if path is None:
        return None
    try:
        return parse_beliefs(read_text_file(path, "the beliefs"))
    except RecordError as error:
        raise ConfigError(f"{path}: {error}") from None


def instance_usd(
    config: Config,
    catalogue: Catalogue,
    profile: FittedCost | None,
    instance_hours: dict[str, float],
) -> float | None:
    """Returns the price of the instances, or None if a device has no price or was measured."""
    from moonpool.sim.hardware.build import instance_usd_per_h
    from moonpool.sim.hardware.prices import parse_prices

    if profile is not None:
        return None
    try:
        prices = instance_usd_per_h(config, parse_prices("", catalogue))
    except ConfigError:
        return None
    return round(sum(hours * prices[Role(role)] for role, hours in instance_hours.items()), 4)
