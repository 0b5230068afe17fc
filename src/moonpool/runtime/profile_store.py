"""Cost estimates of this machine and model, kept in the user's cache folder and refined at each
start.

A measurement on a busy machine is too slow, never too fast; so of each kind of step the best time
ever seen is kept, and the cost model fitted to those. The instances of a machine start at the
same time; a lock makes the first one measure while the others wait for its result.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from moonpool import __version__
from moonpool.cost.fitted import FittedCost
from moonpool.engine.calibrate import (
    DECODES,
    MIXED,
    PREFILLS,
    Measured,
    Sample,
    curve_of,
    fit_samples,
    measure_curve,
    measure_samples,
)
from moonpool.engine.machine import cpu_name

log = logging.getLogger("moonpool.profile")

FRESH_S = 60.0
"""A profile this young was measured by an instance of the same start."""


def measure_profile(
    engine: Measured, threads: int, curve_s: float, say: Callable[[Sample], None]
) -> tuple[FittedCost, dict[int, float]]:
    """Measures everything anew, the curve of chunk sizes too, for `curve_s` at most; drops what was
    measured before. Returns the fit, and the curve in seconds by tokens."""
    samples = [*measure_samples(engine), *measure_curve(engine, curve_s, say)]
    path = profile_path(engine, threads)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, samples)
    except OSError as error:
        log.info("the cost profile is not kept: %s", error)
    return fit_samples(samples), curve_of(samples)


def refine_profile(engine: Measured, threads: int, only_if_new: bool = False) -> FittedCost:
    """Measures, unless another instance just has (or ever has, with `only_if_new`), and fits to the
    best of all measurements."""
    path = profile_path(engine, threads)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            samples = _read(path)
            stale = samples and not only_if_new and time.time() - path.stat().st_mtime > FRESH_S
            if not samples or stale:
                samples = best_of(samples, measure_samples(engine))
                _write(path, samples)
    except OSError as error:
        log.info("the cost profile is not kept: %s", error)
        samples = measure_samples(engine)
    return fit_samples(samples)


def profile_path(engine: Measured, threads: int) -> Path:
    """Differs whenever the measurements would."""
    what = (
        __version__,
        str((PREFILLS, DECODES, MIXED)),
        engine.layout.fingerprint.hex(),
        engine.ops_name,
        str(threads),
        platform.node(),
        cpu_name(),
    )
    name = hashlib.sha256("\0".join(what).encode()).hexdigest()[:24]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "moonpool" / "profiles" / f"{name}.json"


def best_of(kept: list[Sample], new: list[Sample]) -> list[Sample]:
    """Of each point the faster: a busy machine makes a step slower, never faster."""
    best: dict[tuple[str | int, ...], Sample] = {}
    for sample in (*kept, *new):
        point = (
            sample.kind,
            sample.new_tokens,
            sample.context_tokens,
            sample.batch,
            sample.decode_context_tokens,
        )
        if point not in best or sample.seconds < best[point].seconds:
            best[point] = sample
    return list(best.values())


def _write(path: Path, samples: list[Sample]) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(msgspec.json.encode(samples))
    partial.replace(path)


def _read(path: Path) -> list[Sample]:
    try:
        kept: list[Sample] = msgspec.json.decode(path.read_bytes(), type=list[Sample])
    except FileNotFoundError:
        return []
    except msgspec.DecodeError as error:
        log.warning("ignoring the damaged profile %s: %s", path, error)
        return []
    return kept
