"""Stores blocks into random slots until it is killed, and prints what it begins and what has ended.

`test_store_crash` runs it: store_writer.py ROOT SLICE_BYTES SEED
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from store_harness import Bench, key_of, make_layout

from moonpool.protocol.transfer_events import StoreEnded
from moonpool.types import BlockId

NUM_SLOTS = 64


def say(*words: object) -> None:
    """Prints a line with one write, so that it is complete or missing."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def write_forever(root: Path, slice_bytes: int, seed: int) -> None:
    bench = Bench(root, make_layout(slice_bytes), num_slots=NUM_SLOTS, num_blocks=NUM_SLOTS)
    rng = random.Random(seed)
    number = seed * 1_000_000
    say("ready")
    while True:
        count = rng.randint(1, 12)
        first = rng.randrange(NUM_SLOTS - count)
        slots = list(range(first, first + count))
        if rng.random() < 0.5:
            rng.shuffle(slots)
        numbers = range(number, number + count)
        number += count
        for block, key_number in enumerate(numbers):
            bench.fill(block, key_of(key_number))
        for slot, key_number in zip(slots, numbers, strict=True):
            say("begin", slot, key_number)
        keys = tuple(map(key_of, numbers))
        bench.store.store("s", keys, tuple(map(BlockId, range(count))), tuple(slots))
        assert bench.event(StoreEnded).num_blocks == count
        for slot, key_number in zip(slots, numbers, strict=True):
            say("end", slot, key_number)
        if rng.random() < 0.2:
            bench.store.forget([slots[0]])
            say("begin", slots[0], -1)


if __name__ == "__main__":
    write_forever(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
