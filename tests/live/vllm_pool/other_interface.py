"""Runs `run` in a vLLM whose interface was changed: `python -m tests.live.vllm_pool.other_interface
WHAT MODEL SETTINGS SALT OPTIONS`, where `change` knows WHAT.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.request import Request

from tests.live.vllm_pool.run import main


def get_finished(self: Any, finished_req_ids: set[str], num_steps: int = 0) -> Any:
    """Takes one parameter more than vLLM's own method."""
    return None, None


def list_of(register: Any) -> Any:
    """Gives the connector KVCache tensors without layer names."""

    def register_kv_caches(self: Any, kv_caches: dict[str, Any]) -> None:
        register(self, list(kv_caches.values()))

    return register_kv_caches


def change(what: str) -> None:
    match what:
        case "version":
            vllm.__version__ = "0.99.0"
        case "method":
            KVConnectorBase_V1.get_finished = get_finished
        case "module":
            # This vLLM lacks a module or a name that the connector imports.
            sys.modules["moonpool_engine.vllm.connector"] = None  # type: ignore[assignment]
        case "request":
            Request.__init__.__signature__ = inspect.Signature(
                [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
            )
        case "tensors":
            from moonpool_engine.vllm.connector import MoonpoolConnector as Own

            Own.register_kv_caches = list_of(Own.register_kv_caches)
        case _:
            raise ValueError(what)


if __name__ == "__main__":
    change(sys.argv.pop(1))
    main()
