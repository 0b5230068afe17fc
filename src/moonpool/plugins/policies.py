"""Loads policies from outside the package, which a configuration names as "module:Class".

docs/extending.md describes the interfaces. The Conductor and the block pools are pure: they receive
the loaded objects. A caller in Python may pass an object itself, under its config key; the name in
the configuration is then only a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moonpool.conductor.admission.policies import CustomAdmission
from moonpool.conductor.attempt_planner import Policies
from moonpool.conductor.placement.policies import CustomPlacement
from moonpool.config.tables import ConductorConfig, ConfigError, is_own_policy
from moonpool.kvcache.eviction.policies import EvictionPolicy, register_eviction
from moonpool.plugins.objects import find_object, make_object

EVICTION_METHODS = (
    *("store", "touch", "add", "remove", "pop", "evict", "forget"),
    *("__len__", "__contains__"),
)


Objects = Mapping[str, Any]
"""Classes, functions or policies by config key, such as "conductor.placement"."""


def load_policies(config: ConductorConfig, objects: Objects = MappingProxyType({})) -> Policies:
    """New objects of the named placement and admission policies. Raises ConfigError."""
    placement = admission = None
    if is_own_policy(config.placement):
        policy = _make("conductor.placement", config.placement, objects)
        placement = CustomPlacement(config.placement, policy)
    if is_own_policy(config.admission):
        policy = _make("conductor.admission", config.admission, objects)
        admission = CustomAdmission(config.admission, policy)
    return Policies(placement, admission)


def own_classes(policies: Policies) -> tuple[Any, ...]:
    """The classes, or the functions, that policies from outside the package are made of."""
    adapters = (policies.placement, policies.admission)
    own = [getattr(each, "policy", each) for each in adapters if each is not None]
    return tuple(each if hasattr(each, "__qualname__") else type(each) for each in own)


def load_eviction(name: str, objects: Objects = MappingProxyType({})) -> None:
    """Makes the named eviction policy known to `make_eviction`. Raises ConfigError."""
    if not is_own_policy(name):
        return
    key = "pool.eviction"
    make = objects.get(key) or find_object(key, name)
    policy = make_object(key, name, make, 1)
    lacking = [method for method in EVICTION_METHODS if not hasattr(policy, method)]
    if lacking:
        raise ConfigError(f"{key} {name}: its policy lacks the method {lacking[0]}")

    def make_policy(num_blocks: int) -> EvictionPolicy:
        made: EvictionPolicy = make_object(key, name, make, num_blocks)
        return made

    register_eviction(name, make_policy)


def _make(key: str, name: str, objects: Objects) -> Any:
    """A class is instantiated without arguments; a function, or another object, is the policy."""
    found = objects.get(key) or find_object(key, name)
    policy = make_object(key, name, found) if isinstance(found, type) else found
    if not callable(policy):
        raise ConfigError(f"{key} {name}: it cannot be called; give it a method __call__(context)")
    return policy
