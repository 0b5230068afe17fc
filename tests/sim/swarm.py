"""Runs many seeds and prints which fail: `python -m tests.sim.swarm --seeds 2000`."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.sim.world import World


class SeedFailed(AssertionError):
    """Is raised if a run violated an invariant; the text says how to repeat the run."""


def run_seed(seed: int) -> World:
    world = World(seed)
    try:
        world.run()
    except Exception as error:
        raise SeedFailed(
            f"seed {seed} at {world.clock.now:.4f} s: {type(error).__name__}: {error}\n"
            f"{world.options.shown()}\nrepeat: python -m tests.sim.swarm --first {seed} --seeds 1"
        ) from error
    return world


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--max-failures", type=int, default=3)
    args = parser.parse_args()
    failures: list[int] = []
    seen: Counter[str] = Counter()
    began_s = time.perf_counter()
    for seed in range(args.first, args.first + args.seeds):
        try:
            seen += run_seed(seed).seen
        except SeedFailed as error:
            failures.append(seed)
            print(error)
            traceback.print_exception(error.__cause__, limit=-6)
            if len(failures) == args.max_failures:
                break
    wall_s = time.perf_counter() - began_s
    print(", ".join(f"{name} {count}" for name, count in sorted(seen.items())))
    print(f"{args.seeds} seeds in {wall_s:.1f} s; failed: {failures or 'none'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
