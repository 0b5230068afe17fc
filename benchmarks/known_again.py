"""CPU time until a new head knows all cached blocks again, from the snapshots of its workers.

The messages are those of the wire, and the index is the Conductor's. The head decodes and loads one
snapshot after another, and does nothing else meanwhile.

    python benchmarks/known_again.py [--blocks 1000000] [--instances 4]
"""

from __future__ import annotations

import argparse
import os
import time

import msgspec

from moonpool.gc_tuning import settle_memory
from moonpool.kvcache.prefix_index import PrefixIndex
from moonpool.protocol.block_hash import KEY_BYTES
from moonpool.protocol.frames import UpFrame
from moonpool.protocol.messages import BlocksSnapshot
from moonpool.types import BlockKey, InstanceId

ROUNDS = 3


def measure(num_blocks: int, num_instances: int) -> tuple[float, float, int]:
    """Returns the CPU seconds for all snapshots, for the slowest one, and the bytes of all."""
    each = num_blocks // num_instances
    encode = msgspec.msgpack.Encoder().encode
    bodies = []
    for _ in range(num_instances):
        keys = tuple(BlockKey(os.urandom(KEY_BYTES)) for _ in range(each))
        bodies.append(encode(BlocksSnapshot(next_sequence=1, keys=keys)))
    decoder = msgspec.msgpack.Decoder(UpFrame)
    index = PrefixIndex()
    times_s: list[float] = []
    for number, body in enumerate(bodies):
        name = InstanceId(f"mixed-{number}")
        index.add_instance(name, 1, each)
        start_s = time.process_time()
        report = decoder.decode(body)
        assert isinstance(report, BlocksSnapshot)
        assert index.load_snapshot(name, 1, report.next_sequence, report.keys)
        times_s.append(time.process_time() - start_s)
    assert index.num_blocks(name) == each
    return sum(times_s), max(times_s), sum(map(len, bodies))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--instances", type=int, default=4)
    asked = parser.parse_args()
    settle_memory()  # as the head does
    all_s, longest_s, size = min(measure(asked.blocks, asked.instances) for _ in range(ROUNDS))
    print(f"{asked.blocks:,} blocks of {asked.instances} instances, {size / 1e6:.0f} MB")
    print(f"known again after {all_s:.2f} s of CPU; the longest snapshot takes {longest_s:.2f} s")


if __name__ == "__main__":
    main()
