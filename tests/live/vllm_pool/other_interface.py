"""As `run`, in a vLLM with another interface: `python -m tests.live.vllm_pool.other_interface
version|method MODEL SETTINGS SALT OPTIONS`."""

from __future__ import annotations

import sys
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from tests.live.vllm_pool.run import main


def get_finished(self: Any, finished_req_ids: set[str], num_steps: int = 0) -> Any:
    """Has a parameter more than vLLM's."""
    return None, None


if __name__ == "__main__":
    if sys.argv.pop(1) == "version":
        vllm.__version__ = "0.99.0"
    else:
        KVConnectorBase_V1.get_finished = get_finished
    main()
