"""Finds the processes of a cluster, by kind."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

KINDS = {  # a word of the command line -> kind; workers say their role
    "head-process": "head",
    "stage": "stage",
    "rank": "rank",
    "moonpool.api.grammars.check_process": "grammar check",
    "moonpool.api.body_process": "body reader",
    "moonpool_engine.transfer.nixl_agent_process": "NIXL agent",
}
IMPORTING = " fork-server "
SPARE = "moonpool spare fork server"
FORK_SERVER = ("moonpool fork server", IMPORTING)


class Process(NamedTuple):
    pid: int
    parent: int
    command: str


def processes() -> list[Process]:
    """Returns all living processes of this machine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if state != "Z":
                found.append(Process(int(folder.name), int(parent), words.strip()))
    return found


def kind_of(command: str) -> str:
    """Returns `head`, `fork server`, `stage` and so on, or a worker's role; "" for an unknown
    process."""
    if any(words in f"{command} " for words in FORK_SERVER):
        return "fork server"
    if command == SPARE:
        return "spare fork server"
    words = command.split()
    if "--role" in words[:-1]:
        role = words[words.index("--role") + 1]
        return "attention worker" if role == "attention" else role
    return next((kind for word, kind in KINDS.items() if word in words), "")


def victims(supervisor: int, ready: bool = False) -> dict[str, list[int]]:
    """The processes that the supervisor and its children have started, by kind. `ready`: leaves out
    a fork server that still imports."""
    by_parent: dict[int, list[Process]] = {}
    for process in processes():
        by_parent.setdefault(process.parent, []).append(process)
    found: dict[str, list[int]] = {}
    parents = [supervisor]
    while parents:
        for child in by_parent.get(parents.pop(), ()):
            parents.append(child.pid)
            if ready and IMPORTING in f"{child.command} ":
                continue
            if kind := kind_of(child.command):
                found.setdefault(kind, []).append(child.pid)
    return {kind: sorted(pids) for kind, pids in sorted(found.items())}
