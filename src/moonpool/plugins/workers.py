"""Kinds of workers: processes that join a head. Packages provide workers, by entry points of the
group `moonpool.workers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from moonpool.config.tables import VllmAddress
from moonpool.cores import CoreShare
from moonpool.link.tls import PeerTls
from moonpool.plugins.engines import PACKAGE
from moonpool.plugins.entry_points import entry_points, load
from moonpool.types import InstanceId, Role

GROUP = "moonpool.workers"
WorkerKind = Literal["moonpool", "attention", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings on the command line of a worker. `role` is the role of its instance, or None for
    an attention worker. `host`: address at which peers connect; None means the address that faces
    the head. `num_stages` and `num_ranks` override the head's numbers. `kept`: paths of memory
    files that an earlier process of this instance may have filled. `shared`: the result of
    `EnginePackage.share_weights`."""

    name: InstanceId
    role: Role | None
    machine: str
    host: str | None
    secret: bytes
    tls: PeerTls | None
    share: CoreShare
    num_stages: int | None = None
    num_ranks: int | None = None
    kept: tuple[str, str] | None = None
    shared: object | None = None
    vllm: VllmAddress | None = None
    vllm_key: str = ""


class RunnableWorker(Protocol):
    async def run(self, head_host: str, head_port: int) -> None:
        """Serves until the head stops this worker, or it is cancelled. Raises WorkerError."""

    def not_ready(self) -> str:
        """Returns "", or why this worker does no work for the head now."""


@runtime_checkable
class DrainableWorker(RunnableWorker, Protocol):
    """A worker whose instance can be drained before it ends."""

    def ask_to_leave(self, within_s: float) -> bool:
        """Asks the head to drain the instance within so many seconds. Returns whether it was
        asked."""


MakeWorker = Callable[[WorkerSettings], RunnableWorker]


def worker_maker(kind: WorkerKind) -> MakeWorker:
    """Imports what a worker of this kind needs. Raises ModuleNotFoundError, of which the command
    makes one line, where its package is absent."""
    points = entry_points(GROUP)
    if kind not in points:
        raise ModuleNotFoundError(name=PACKAGE)
    found: MakeWorker = load(points[kind])
    return found
