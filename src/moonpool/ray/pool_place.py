"""The places at which the actors of a node find its pool."""

from __future__ import annotations

from pathlib import Path

import ray

from moonpool.host_pool.places import SOCKET_VARIABLE, default_memory_folder, default_socket


def pool_folder(cluster: str, node_id: str) -> Path:
    """The memory of the pool of a cluster on a node. Nodes on one machine have one each."""
    return default_memory_folder() / f"ray-{cluster}-{node_id[:12]}"


def pool_socket(cluster: str, node_id: str) -> Path:
    return default_socket().with_name(f"ray-{cluster[:24]}-{node_id[:12]}.sock")


def own_node() -> str:
    """The id of the node of this actor."""
    return str(ray.get_runtime_context().get_node_id())


def pool_environment(cluster: str) -> dict[str, str]:
    """Returns the environment variables by which vLLM, and the worker in front of it, find the pool
    of this node."""
    return {SOCKET_VARIABLE: str(pool_socket(cluster, own_node()))}
