"""Finds what users add to moonpool: objects named "module:Name", and objects that packages install.

An installed package names its policies and trace formats as entry points (docs/extending.md). Names
of installed objects are replaced by "module:Name", so that every process and every file of figures
says which object ran. A module is found on `sys.path` or in the current working directory.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from moonpool.config.tables import (
    ADMISSIONS,
    EVICTIONS,
    PLACEMENTS,
    ConfigError,
    is_own_policy,
)
from moonpool.plugins.entry_points import entry_points

GROUPS = {
    "conductor.placement": "moonpool.placement",
    "conductor.admission": "moonpool.admission",
    "pool.eviction": "moonpool.eviction",
    "trace format": "moonpool.trace_format",
}
"""The group of entry points of each kind of extension, by config key."""
BUILT_IN = {
    "conductor.placement": PLACEMENTS,
    "conductor.admission": ADMISSIONS,
    "pool.eviction": EVICTIONS,
}
"""Names that need no look at the installed packages, which takes some milliseconds."""


def installed_names(key: str) -> dict[str, str]:
    """Returns the "module:Name" of each name that installed packages give to this kind."""
    return dict(entry_points(GROUPS[key]))


def own_name(key: str, name: str) -> str:
    """Returns the "module:Name" of an installed name, and every other name unchanged."""
    if name in BUILT_IN.get(key, ()) or is_own_policy(name):
        return name
    return installed_names(key).get(name, name)


def find_object(key: str, name: str) -> Any:
    """Returns the object named "module:Name". Raises ConfigError, which names `key`."""
    module_name, _, attribute = name.partition(":")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{key} {name}: its module needs {error.name!r}") from None
        raise ConfigError(
            f"{key} {name}: there is no module {module_name!r} in {folder} or on PYTHONPATH"
        ) from None
    except Exception as error:
        text = f"{key} {name}: its module fails with {type(error).__name__}: {error}"
        raise ConfigError(text) from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{key} {name}: {module.__file__} defines no {attribute!r}")
    return getattr(module, attribute)


def make_object(key: str, name: str, make: Any, *arguments: Any) -> Any:
    """Returns `make(*arguments)`. Raises ConfigError, whatever fails."""
    try:
        return make(*arguments)
    except Exception as error:
        given = f" with {arguments[0]} block" if arguments else ""
        text = f"{key} {name}: creating it{given} fails with {type(error).__name__}: {error}"
        raise ConfigError(text) from error
