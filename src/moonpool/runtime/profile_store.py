"""Cost estimates of this machine and model: measured once, kept in the user's cache folder.

The instances of a machine start at the same time; a lock makes one measure while the others wait
for its result, so that they do not measure each other's noise.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
from pathlib import Path

import msgspec

from moonpool import __version__
from moonpool.cost.fitted import FittedCost
from moonpool.engine.calibrate import measure_cost
from moonpool.engine.machine import cpu_name
from moonpool.engine.runner import Engine

log = logging.getLogger("moonpool.profile")


def load_or_measure(engine: Engine, threads: int, fresh: bool = False) -> FittedCost:
    """The kept profile of this engine on this machine, or a new measurement (`fresh` forces
    one)."""
    path = profile_path(engine, threads)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            cost = None if fresh else _read(path)
            if cost is not None:
                return cost
            cost = measure_cost(engine)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_bytes(msgspec.json.encode(cost))
            partial.replace(path)
            return cost
    except OSError as error:
        log.info("the cost profile is not kept: %s", error)
        return measure_cost(engine)


def profile_path(engine: Engine, threads: int) -> Path:
    """Differs whenever the measurements would."""
    layout = engine.layout
    what = (
        __version__,
        layout.fingerprint.hex(),
        engine.ops_name,
        str(threads),
        platform.node(),
        cpu_name(),
    )
    name = hashlib.sha256("\0".join(what).encode()).hexdigest()[:24]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "moonpool" / "profiles" / f"{name}.json"


def _read(path: Path) -> FittedCost | None:
    try:
        kept: FittedCost = msgspec.json.decode(path.read_bytes(), type=FittedCost)
        return kept
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        log.warning("ignoring the damaged profile %s: %s", path, error)
        return None
