"""Stands for `vllm serve` in tests: takes vLLM's flags, and refuses others, like vLLM."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.live.vllm_stub import VllmStub


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--kv-events-config", type=json.loads, default={})
    parser.add_argument("--kv-transfer-config", type=json.loads, default={})
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--data-parallel-size", type=int, default=0)
    given = parser.parse_args()
    if given.kv_transfer_config:
        assert os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"]
    name = given.served_model_name or given.model
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    stub = VllmStub(name, root=given.model, max_model_len=given.max_model_len, port=given.port)
    stub.num_ranks = given.data_parallel_size
    stub.start()
    ended.wait()
    stub.stop()


main()
