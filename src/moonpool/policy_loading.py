"""Loads policies from outside the package, which a configuration names as "module:Class".

The module is found on `sys.path` or in the current working directory. docs/extending.md describes
the interfaces. The Conductor and the block pools are pure: they receive the loaded objects.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from moonpool.conductor.admission import CustomAdmission
from moonpool.conductor.attempt_planner import Policies
from moonpool.conductor.policies import CustomPlacement
from moonpool.config import ConductorConfig, ConfigError, is_own_policy
from moonpool.kvcache.eviction import EvictionPolicy, register_eviction

EVICTION_METHODS = (
    *("store", "touch", "add", "remove", "pop", "evict", "forget"),
    *("__len__", "__contains__"),
)


def load_policies(config: ConductorConfig) -> Policies:
    """New objects of the named placement and admission policies. Raises ConfigError."""
    placement = admission = None
    if is_own_policy(config.placement):
        policy = _make("conductor.placement", config.placement)
        placement = CustomPlacement(config.placement, policy)
    if is_own_policy(config.admission):
        policy = _make("conductor.admission", config.admission)
        admission = CustomAdmission(config.admission, policy)
    return Policies(placement, admission)


def own_classes(policies: Policies) -> tuple[Any, ...]:
    """The classes, or the functions, that policies from outside the package are made of."""
    adapters = (policies.placement, policies.admission)
    own = [getattr(each, "policy", each) for each in adapters if each is not None]
    return tuple(each if hasattr(each, "__qualname__") else type(each) for each in own)


def load_eviction(name: str) -> None:
    """Makes the named eviction policy known to `make_eviction`. Raises ConfigError."""
    if not is_own_policy(name):
        return
    key = "pool.eviction"
    make = _find(key, name)
    policy = _call(key, name, make, 1)
    lacking = [method for method in EVICTION_METHODS if not hasattr(policy, method)]
    if lacking:
        raise ConfigError(f"{key} {name}: its policy lacks the method {lacking[0]}")

    def make_policy(num_blocks: int) -> EvictionPolicy:
        made: EvictionPolicy = _call(key, name, make, num_blocks)
        return made

    register_eviction(name, make_policy)


def _make(key: str, name: str) -> Any:
    """A class is instantiated without arguments; a function, or another object, is the policy."""
    found = _find(key, name)
    policy = _call(key, name, found) if isinstance(found, type) else found
    if not callable(policy):
        raise ConfigError(f"{key} {name}: it cannot be called; give it a method __call__(context)")
    return policy


def _find(key: str, name: str) -> Any:
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


def _call(key: str, name: str, make: Any, *arguments: Any) -> Any:
    try:
        return make(*arguments)
    except Exception as error:
        given = f" with {arguments[0]} block" if arguments else ""
        text = f"{key} {name}: creating it{given} fails with {type(error).__name__}: {error}"
        raise ConfigError(text) from error
