"""The module that vLLM's `kv_connector_module_path` names: the class `MoonpoolConnector`.

The connector is in the package `moonpool-engine`, in vLLM's own environment.
"""

from __future__ import annotations

from typing import Any

from moonpool.plugins.entry_points import connector_class


def __getattr__(name: str) -> Any:
    if name == "MoonpoolConnector":
        return connector_class("vllm")
    raise AttributeError(name)
