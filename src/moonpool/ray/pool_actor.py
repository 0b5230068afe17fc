"""The actor of a node's pool: `moonpool pool serve` for the vLLM servers on that node."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

import ray

from moonpool.children.process import ChildProcess
from moonpool.children.start import moonpool_line
from moonpool.ray.pool_place import own_node, pool_folder, pool_socket
from moonpool.ray.process_actor import ProcessActor


class PoolActor(ProcessActor):
    """Keeps the pool running. The pool's blocks outlive its process, and are removed when the actor
    leaves. The memory of an actor that was killed is removed by a later pool of this cluster on the
    same machine, if its node is gone."""

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str],
        cluster: str,
        num_bytes: int,
        flags: Sequence[str],
    ) -> None:
        """`cluster`: the name of the cluster in Ray. `num_bytes`: bytes of memory for blocks."""
        super().__init__(name, environment)
        self._num_bytes, self._flags = num_bytes, tuple(flags)
        self._socket = pool_socket(cluster, own_node())
        self._folder = pool_folder(cluster, own_node())
        self._remove_left_over(cluster)
        self._keep(name)

    async def leave(self, within_s: float) -> None:
        await super().leave(within_s)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _spawn(self, name: str) -> ChildProcess:
        line = ["pool", "serve", "--dram", str(self._num_bytes), "--socket", str(self._socket)]
        line += ["--memory-folder", str(self._folder), "--host", self._host, *self._flags]
        return await self._start(moonpool_line(*line))

    def _remove_left_over(self, cluster: str) -> None:
        """Removes the memory of this cluster's pools on nodes that are gone: their actors were
        killed."""
        alive = {pool_folder(cluster, node["NodeID"]) for node in ray.nodes() if node["Alive"]}
        for folder in self._folder.parent.glob(f"ray-{cluster}-*"):
            if folder not in alive:
                shutil.rmtree(folder, ignore_errors=True)
