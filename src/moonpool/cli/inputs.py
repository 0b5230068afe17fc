"""Reads the files that commands take: text, traces, the hardware catalogue and profiles."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from moonpool.cli.output import fail
from moonpool.config import Config, ConfigError
from moonpool.trace.row import TraceError, TraceInfo, TraceRow
from moonpool.trace.transform import scale_trace
from moonpool.types import MALFORMED

if TYPE_CHECKING:
    from moonpool.cost.fitted import FittedCost
    from moonpool.sim.hardware.catalogue import Catalogue


def read_text(path: str, what: str) -> str:
    """Returns a text file's content; `what` names it in the error that ends the command."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        fail(f"cannot read {what} {path}: {error.strerror}")
    except UnicodeDecodeError:
        fail(f"cannot read {what} {path}: it is not UTF-8 text")


def read_rows(
    trace_file: str, limit: int | None, scale: Fraction, speed: float = 1.0
) -> tuple[tuple[TraceRow, ...], int]:
    """Returns the trace's scaled rows and the tokens of their blocks.

    Ends the command where the trace cannot be read.
    """
    from moonpool.trace.reader import open_trace

    try:
        trace = scale_trace(open_trace(trace_file, limit=limit, speed=speed), scale)
        rows = tuple(trace)
    except TraceError as error:
        fail(str(error))
    report_skipped(trace.info)
    return rows, trace.info.block_tokens


def trace_digest(trace_file: str) -> str:
    """Returns a digest of the file's bytes, for the figures of a run; "" if it is no file."""
    path = Path(trace_file)
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def report_skipped(info: TraceInfo) -> None:
    """Prints on stderr how many rows of a trace are no requests, if there are any."""
    if info.skipped_rows:
        rows = f"{info.skipped_rows:,} of {info.num_rows + info.skipped_rows:,} rows"
        click.echo(f"left out: {rows}, which have no prompt or no answer", err=True)


def open_catalogue_and_profile(
    config: Config, catalogue_file: str | None
) -> tuple[Catalogue, FittedCost | None]:
    """Opens the catalogue of hardware, and the profile if `hardware.cost` names one.

    Ends the command if either cannot be read.
    """
    from moonpool.cost.fitted import Profile
    from moonpool.sim.hardware.catalogue import BUILT_IN, parse_catalogue

    catalogue = BUILT_IN
    if catalogue_file is not None:
        try:
            catalogue = parse_catalogue(read_text(catalogue_file, "the catalogue"))
        except ConfigError as error:
            fail(str(error))
    profile = None
    if config.hardware.cost.endswith(".json"):
        text = read_text(config.hardware.cost, "the profile")
        try:
            profile = msgspec.json.decode(text, type=Profile)
        except MALFORMED as error:
            fail(f"{config.hardware.cost} is no profile of `moonpool profile --json`: {error}")
        _check_profile(profile, config.hardware.cost)
    return catalogue, profile


def _check_profile(profile: FittedCost, path: str) -> None:
    times = (*profile.prefill, *profile.decode, profile.transfer_latency_s)
    if min(times) < 0:
        fail(f"{path} holds a negative time: measure it again with `moonpool profile --json`")
    if min(profile.shared_memory_bytes_per_s, profile.network_bytes_per_s) <= 0:
        fail(f"{path} holds a bandwidth of 0 or less: measure it again with `moonpool profile`")
