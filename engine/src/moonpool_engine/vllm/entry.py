"""The class that vLLM gets: the pool's connector, or one that moves nothing where this vLLM's
interface is not known. So a change in vLLM causes one log line, and no wrong answer."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

from moonpool_engine.vllm.idle_connector import idle_connector
from moonpool_engine.vllm.known_interface import TRIED_WITH, why_unknown

BASES = ("KVConnectorBase_V1", "KVConnectorBase")
"""Names of vLLM's class of connectors, the most specific first."""


def __getattr__(name: str) -> Any:
    if name == "MoonpoolConnector":
        return connector_class()
    raise AttributeError(name)


@functools.cache
def connector_class() -> Any:
    """The class for this vLLM. Raises ImportError, in one line, if it has no connectors at all."""
    import vllm

    version = str(getattr(vllm, "__version__", "of no version"))
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1 import base
        from vllm.v1.request import Request

        reason = why_unknown(version, base.KVConnectorBase_V1, Request)
        if not reason:
            from moonpool_engine.vllm.connector import MoonpoolConnector

            return MoonpoolConnector
    except (ImportError, AttributeError, TypeError) as error:
        said = " ".join(str(error).split())[:300]
        reason = f"vLLM {version} lacks what its connectors had ({said}): {TRIED_WITH}"
    return idle_connector(_base_module(reason), reason)


def _base_module(reason: str) -> Any:
    """Returns the module in which vLLM has its class of connectors: vLLM has loaded it before it
    loads this one. Raises ImportError."""
    for name in BASES:
        for module_name, module in list(sys.modules.items()):
            found = vars(module).get(name) if module_name.split(".")[0] == "vllm" else None
            if isinstance(found, type):
                own = vars(sys.modules.get(found.__module__, module))
                return SimpleNamespace(**{**own, "KVConnectorBase_V1": found})
    raise ImportError(reason)
