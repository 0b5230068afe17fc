"""Reads the output of the clients' scripts, and the rows of earlier runs."""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks.clients.environments import read_clients
from benchmarks.clients.page import RESULTS

_MARK = "RESULT "
_PATH = re.compile(r"(?<![\w:/.])/(?:tmp|root|home|work)/\S+")


def read_tries(out: str, err: str) -> list[dict[str, Any]]:
    """Returns the tries that a script printed. A script that failed before its first try also gets
    a row."""
    tries = [
        json.loads(line.removeprefix(_MARK)) for line in out.splitlines() if line.startswith(_MARK)
    ]
    for each in tries:
        each["remark"] = _PATH.sub("(a path)", each["remark"])
    if tries:
        return tries
    last = (err.strip().splitlines() or ["it printed nothing"])[-1]
    return [{"feature": "all", "works": False, "remark": last[:300]}]


def merge(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the earlier result with these rows in place of those of the same clients."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known = {row["name"]: row for row in [*found.get("clients", []), *rows]}
    order = [client.name for client in read_clients()]
    return found | {"clients": [known[name] for name in order if name in known]}
