"""Measured step times of this machine and model, stored in the user's cache folder.

The first start of a model measures step times, and the first start of each week refines them. A
busy machine makes a measurement slower, never faster, so the store keeps the best time of each kind
of step, and the cost model is fitted to the best times. Each start runs one or two steps, and
measures all again if they are much faster than the stored times. If several instances of a machine
start at the same time, the first one measures under a lock, while the others wait for its result.
`moonpool profile` measures all times again.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from moonpool import __version__
from moonpool.cores import cpu_name
from moonpool.cost.fitted import FittedCost
from moonpool.types import MALFORMED, Struct
from moonpool_engine.engine.calibrate import (
    BRIEF_PREFILLS,
    DECODES,
    MIXED,
    PREFILLS,
    MeasuredEngine,
    StepSample,
    curve_of,
    fit_samples,
    is_much_faster,
    measure_curve,
    measure_samples,
)

log = logging.getLogger("moonpool.profile")

KEPT_S = 7 * 86400.0
"""A machine changes: an older profile is refined. Load and temperature are learned while serving
(`cost.online`)."""
LOCK_S = 120.0
"""A process that holds the lock for longer is stopped or hangs. Without kernels, measuring may need
most of this time."""
LOOK_S = 0.02
_FILE = re.compile(r"[0-9a-f]{24}\.(?:json|lock|\d+)")


class StoredProfile(Struct, frozen=True, kw_only=False):
    """A file of the store: the step times, and what was measured."""

    model: str
    ops: str
    threads: int
    samples: list[StepSample]


class KeptProfile(Struct, frozen=True, kw_only=False):
    """A file of the store, as a list shows it. `model` is empty if an earlier release wrote the
    profile, or if the profile is damaged. `measured_s` is given in seconds since 1970."""

    path: str
    measured_s: float
    model: str = ""
    ops: str = ""
    threads: int = 0

    def describe(self) -> str:
        """Returns model, kernels and threads in words, or "" where they are unknown."""
        if not self.model:
            return ""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.model}, {self.ops}, {threads}"


def measure_profile(
    engine: MeasuredEngine,
    threads: int,
    curve_s: float,
    say: Callable[[StepSample], None],
    keep: bool = True,
) -> tuple[FittedCost, dict[int, float]]:
    """Measures everything again, and replaces the stored times if they are to be kept.

    The curve of chunk sizes takes at most `curve_s` seconds. Returns the fit, and the curve in
    seconds by tokens.
    """
    samples = [*measure_samples(engine), *measure_curve(engine, curve_s, say)]
    path = profile_path(engine, threads)
    try:
        if keep:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, _described(engine, threads, samples))
    except OSError as error:
        log.info("the cost profile cannot be stored and is measured at each start: %s", error)
    return fit_samples(samples), curve_of(samples)


def refine_profile(engine: MeasuredEngine, threads: int, only_if_new: bool = False) -> FittedCost:
    """Fits the cost model to the stored times, and measures if there are none.

    Times that are older than `KEPT_S` are measured again, and the better ones kept. Times of a busy
    machine, which are much longer than those of now, are replaced. If `only_if_new`, stored times
    stay as they are, and no step is run.
    """
    path = profile_path(engine, threads)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            _wait_for(lock)
            samples = _read(path)
            may_change = bool(samples) and not only_if_new
            if may_change and is_much_faster(engine, samples):
                log.info("steps are much faster than the stored times: measuring again")
                samples = []
            stale = may_change and time.time() - path.stat().st_mtime > KEPT_S
            if not samples or stale:
                samples = best_of(samples, measure_samples(engine, thorough=False))
                _write(path, _described(engine, threads, samples))
    except OSError as error:
        log.info("the cost profile cannot be stored and is measured at each start: %s", error)
        samples = measure_samples(engine, thorough=False)
    return fit_samples(samples)


def _wait_for(lock: IO[str]) -> None:
    """Takes the lock, or returns without it after `LOCK_S`."""
    by_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > by_s:
                text = "the process that holds %s has not measured within %.0f s: measuring here"
                log.warning(text, lock.name, LOCK_S)
                return
        time.sleep(LOOK_S)


def profile_path(engine: MeasuredEngine, threads: int) -> Path:
    """Returns a path that differs whenever the measurements would differ."""
    what = (
        __version__,
        str((PREFILLS, DECODES, MIXED, BRIEF_PREFILLS)),
        engine.layout.fingerprint.hex(),
        engine.ops_name,
        str(threads),
        platform.node(),
        cpu_name(),
    )
    name = hashlib.sha256("\0".join(what).encode()).hexdigest()[:24]
    return profiles_folder() / f"{name}.json"


def profiles_folder() -> Path:
    """Returns the folder of the store, which may not exist."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "moonpool" / "profiles"


def kept_profiles() -> list[KeptProfile]:
    """Lists the store, the newest first. Raises OSError."""
    found = []
    for path in _files():
        if path.suffix == ".json":
            stored, when_s = _decoded(path), path.stat().st_mtime
            known = (stored.model, stored.ops, stored.threads) if stored else ()
            found.append(KeptProfile(str(path), when_s, *known))
    return sorted(found, key=lambda each: -each.measured_s)


def clear_profiles() -> None:
    """Deletes the files of the store, and no others. Raises OSError."""
    for path in _files():
        path.unlink(missing_ok=True)


def _files() -> list[Path]:
    folder = profiles_folder()
    names = folder.iterdir() if folder.is_dir() else ()
    return [path for path in names if _FILE.fullmatch(path.name)]


def _described(engine: MeasuredEngine, threads: int, samples: list[StepSample]) -> StoredProfile:
    spec = engine.spec
    millions = spec.num_parameters / 1e6
    model = f"{spec.family}, {spec.num_layers} layers, {millions:,.1f} million parameters"
    return StoredProfile(model, engine.ops_name, threads, samples)


def best_of(kept: list[StepSample], new: list[StepSample]) -> list[StepSample]:
    """Returns the faster sample of each point."""
    best: dict[tuple[str | int, ...], StepSample] = {}
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


def _write(path: Path, stored: StoredProfile) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(msgspec.json.encode(stored))
    partial.replace(path)


def _read(path: Path) -> list[StepSample]:
    stored = _decoded(path)
    return [] if stored is None else stored.samples


def _decoded(path: Path) -> StoredProfile | None:
    """Returns None if the file is absent or damaged. Earlier releases wrote the samples alone."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=StoredProfile | list[StepSample])
    except FileNotFoundError:
        return None
    except MALFORMED as error:
        log.warning("ignoring the damaged profile %s: %s", path, error)
        return None
    return kept if isinstance(kept, StoredProfile) else StoredProfile("", "", 0, kept)
