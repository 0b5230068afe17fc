"""One attention worker without a head, for benchmarks: `python -m moonpool.bench.attention_child`.

Its name and the arena's size come on the command line, the secret by the environment. It prints its
address as one line of JSON, and ends when its input does.
"""

from __future__ import annotations

import os
import sys

import msgspec

from moonpool.attention.keeper import Keeper
from moonpool.attention.service import AttentionService
from moonpool.engine.split_choice import choose_split_ops
from moonpool.messenger.arena import Arena
from moonpool.runtime.settle import settle_threads
from moonpool.types import InstanceId

SECRET_VARIABLE = "MOONPOOL_BENCH_SECRET"  # noqa: S105 - its name, not its value


def main(name: str) -> None:
    settle_threads()
    secret = bytes.fromhex(os.environ[SECRET_VARIABLE])
    keeper = Keeper(InstanceId(name), secret, choose_split_ops(), Arena, "127.0.0.1", True)
    service = AttentionService(InstanceId(name), secret, keeper, "127.0.0.1", True)
    print(msgspec.json.encode(service.start()).decode(), flush=True)
    sys.stdin.read()
    service.close()


if __name__ == "__main__":
    main(sys.argv[1])
