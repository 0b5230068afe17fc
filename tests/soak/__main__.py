"""`python -m tests.soak --operations 200000`: real processes, real files, all kinds of faults."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from pathlib import Path

from tests.soak.cluster import SoakError
from tests.soak.soak import Soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--operations", type=int, default=200_000, help="on blocks, at least")
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--seed", type=int, default=secrets.randbits(20))
    parser.add_argument("--folder", type=Path, help="on the disk to use")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    if args.operations < 1000 or args.instances < 3:
        parser.error("at least 1000 operations and 3 instances")
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="moonpool-soak-", dir=args.folder) as name:
        soak = Soak(Path(name), args.operations, args.instances, args.seed, print)
        try:
            found = soak.run()
        except SoakError as error:
            print(f"seed {args.seed}: {error}")
            print(soak.figures(0.0)["seen"])
            return 1
        finally:
            soak.cluster.close()
    found["seed"] = args.seed
    print(json.dumps(found, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
