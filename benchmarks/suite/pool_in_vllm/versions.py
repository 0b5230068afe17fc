"""Reads the versions of the compared packages from each Python installation."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

PACKAGES = ("vllm", "torch", "lmcache", "mooncake-transfer-engine-non-cuda")
_ASK = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
def of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
print(json.dumps({name: of(name) for name in sys.argv[1:]}))
"""


def versions_of(pythons: Mapping[Any, str]) -> dict[str, dict[str, str]]:
    """Returns the versions of the packages that each Python has, by the purpose of the Python."""
    found: dict[str, dict[str, str]] = {}
    for name, python in pythons.items():
        done = subprocess.run(
            [python, "-c", _ASK, *PACKAGES], capture_output=True, check=False, text=True
        )
        told = json.loads(done.stdout) if not done.returncode else {}
        found[str(name)] = {package: known for package, known in told.items() if known}
    return found
