"""Runs an attention worker without a head, for measurements.

`python -m moonpool_lab.profiling.attention_process` starts it.

The command line has the worker's name, the environment has the secret. The process prints its
address as one line of JSON, and ends when its input ends.
"""

from __future__ import annotations

import os
import sys

import msgspec

from moonpool.gc_tuning import settle_threads
from moonpool.types import InstanceId
from moonpool_engine.attention_offload.service import AttentionService
from moonpool_engine.attention_offload.worker_state import AttentionWorkerState
from moonpool_engine.engine.runner import choose_split_ops
from moonpool_engine.transfer.arena import Arena

SECRET_VARIABLE = "MOONPOOL_BENCH_SECRET"  # noqa: S105 - its name, not its value


def main(name: str) -> None:
    """Serves until stdin ends."""
    settle_threads()
    secret = bytes.fromhex(os.environ[SECRET_VARIABLE])
    state = AttentionWorkerState(
        InstanceId(name), secret, choose_split_ops(), Arena, "127.0.0.1", True
    )
    service = AttentionService(InstanceId(name), secret, state, "127.0.0.1", True)
    print(msgspec.json.encode(service.start()).decode(), flush=True)
    sys.stdin.read()
    service.close()


if __name__ == "__main__":
    main(sys.argv[1])
