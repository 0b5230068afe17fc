"""Compares an eviction policy of one's own with LRU, in pools of three sizes. Argument: a trace."""

import sys
from collections import OrderedDict

import moonpool


class OldestFirst:
    """First in, first out: a block keeps its place in the queue however often it is used."""

    def __init__(self, num_blocks):
        self.born, self.clock, self.queue = {}, 0, OrderedDict()

    def store(self, block_ids, keys, depths):
        self.clock += 1
        self.born.update(dict.fromkeys(block_ids, self.clock))

    def touch(self, block_ids):
        pass

    def add(self, block_ids, parent):
        self.queue.update(dict.fromkeys(block_ids))

    def remove(self, block_ids):
        for block_id in block_ids:
            del self.queue[block_id]

    def pop(self, num_blocks):
        oldest = sorted(self.queue, key=self.born.__getitem__)[:num_blocks]
        self.remove(oldest)
        return oldest

    def evict(self, block_id):
        del self.queue[block_id]
        return True

    def forget(self, block_id):
        self.queue.pop(block_id, None)

    def __len__(self):
        return len(self.queue)

    def __contains__(self, block_id):
        return block_id in self.queue


for tokens in (200_000, 400_000, 800_000):
    pool = {"pool": {"dram_tokens_per_instance": tokens}}
    hits = [
        moonpool.simulate(
            sys.argv[1], config=pool, mixed=1, admission="none", eviction=policy
        ).summary["cache"]["hit_ratio"]
        for policy in (OldestFirst, "lru")
    ]
    print(f"{tokens:7,} tokens per instance: oldest first {hits[0]:.1%}, lru {hits[1]:.1%}")
