"""Finds the folders of a checkout that are not part of the package: benchmarks and papers."""

from __future__ import annotations

import sys
from pathlib import Path

import moonpool


def find_checkout(folder: str) -> Path | None:
    """Returns the root of the checkout from which this package runs, if it has `folder`, or None.

    The root is then on `sys.path`, so that `import benchmarks` and `import papers` work.
    """
    root = Path(moonpool.__file__).resolve().parents[2]
    if not (root / folder / "__init__.py").is_file():
        return None
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return root
