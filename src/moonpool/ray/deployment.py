"""A cluster on Ray: its placement groups and actors, from `deploy` to `RayDeployment.stop`.

The process that calls `deploy` owns the groups and actors: when that process ends, however it ends,
Ray ends them all. The running cluster does not depend on that process otherwise. KVCache and tokens
go over moonpool's own connections; Ray carries names, places and commands to start and stop.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from moonpool.config.parse import write_toml
from moonpool.config.tables import Config
from moonpool.head.cluster_error import ClusterError
from moonpool.head.launcher import worker_environment
from moonpool.ray.demands import (
    HEAD,
    ActorGroup,
    Member,
    added_group,
    first_groups,
    lacking,
    settled,
    total_of,
)
from moonpool.ray.head_actor import HeadActor, HeadActorSettings
from moonpool.ray.head_finder import HeadPlace
from moonpool.ray.pool_actor import PoolActor
from moonpool.ray.process_actor import LEAVE_S
from moonpool.ray.scaling import changes
from moonpool.ray.worker_actor import VllmActor, WorkerActor
from moonpool.types import Role

log = logging.getLogger("moonpool.ray")

LOOK_S = 1.0
SAY_S = 10.0
ASK_S = 5.0
DRAIN_S = 25.0
"""How long an instance that is given back may finish its requests, as `moonpool worker` does."""
ENDING_S = 20.0
CALLS = 16
"""Calls that one actor handles at a time."""
PASSED_ON = ("MOONPOOL_", "HF_", "VLLM_")
"""Prefixes of variables that processes on other nodes get from this one."""


@dataclass(slots=True)
class _Started:
    """A group that Ray has placed, and its actors by the names of the members."""

    group: ActorGroup
    placement: PlacementGroup
    actors: dict[str, Any]


def deploy(config: Config) -> RayDeployment:
    """Starts a cluster on the Ray cluster of `config.ray.address`, and returns when Ray has placed
    it. Raises ClusterError."""
    deployment = RayDeployment(config)
    try:
        deployment.start()
    except RayError as error:
        deployment.stop()
        raise ClusterError(f"Ray cannot start the cluster: {error}") from None
    except BaseException:
        deployment.stop()
        raise
    return deployment


def _check_listens(address: str) -> None:
    """Raises ClusterError if nothing listens at an address HOST:PORT: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ASK_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise ClusterError(
            f"no Ray runs at {address}: {why}. `ray start --head` starts one; without an address,"
            " the Ray of this machine is used"
        ) from None


class RayDeployment:
    """`start`, then `step` again and again, at last `stop`. `RayDeployment` is not safe for several
    threads."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._own = settled(config)  # the configuration with which the processes start
        self._name = config.ray.name
        self._environment = worker_environment(
            secrets.token_bytes(32), self._own.engine.threads
        ) | {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}
        self._heads: tuple[str, ...] = ()
        self._started: list[_Started] = []
        self._added: dict[Role, dict[int, _Started]] = {Role.PREFILL: {}, Role.DECODE: {}}
        self._leaving: dict[Any, _Started] = {}
        self._pools: dict[str, Any] = {}  # pools' actors by node
        # whether moonpool itself has connected to Ray, so that `stop` disconnects
        self._is_ours = False
        self._requested: list[dict[str, float]] = []

    # Start

    def start(self) -> None:
        """Raises ClusterError."""
        self._connect()
        self._check_name()
        num_nodes = sum(node["Alive"] for node in ray.nodes())
        num_heads = 2 if num_nodes > 1 else 1
        self._heads = tuple(self._actor_name(f"{HEAD}-{i}") for i in range(num_heads))
        groups = first_groups(self.config, num_heads)
        for group in groups:
            self._started.append(self._place(group))
        self._keep_pools()
        for started in self._started:
            self._wait_placed(started)
            self._start_actors(started)

    def _connect(self) -> None:
        """Raises ClusterError."""
        if ray.is_initialized():
            return
        address = self.config.ray.address or os.environ.get("RAY_ADDRESS", "")
        _check_listens(address)
        common: dict[str, Any] = {"namespace": self._name, "logging_level": logging.WARNING}
        try:
            ray.init(address=address or "auto", **common)
        except ConnectionError as error:
            if address:
                raise ClusterError(
                    f"cannot use the Ray cluster at {address}: {error}. It must run, and this"
                    f" machine must be one of its nodes: `ray start --address {address}`"
                ) from None
            self._start_local(common)
        except (RuntimeError, ValueError) as error:
            raise ClusterError(f"cannot use Ray: {error}") from None
        self._is_ours = True

    def _start_local(self, common: dict[str, Any]) -> None:
        """Starts a Ray of this machine alone, whose CPUs are shared by as many processes as are
        asked for. All other requested resources must exist on this machine, because nobody would
        add them. Raises ClusterError.
        """
        log.info("this machine runs no Ray: starting a local one")
        total = total_of(first_groups(self.config, num_heads=1))
        num_cpus = max(os.cpu_count() or 1, math.ceil(total["CPU"]))
        ray.init("local", num_cpus=num_cpus, **common)  # and not one that has crashed
        lacks = lacking(total, ray.cluster_resources())
        if lacks:
            ray.shutdown()
            raise ClusterError(
                f"the cluster asks Ray for {lacks}, which this machine has not: ask for less in"
                " [ray], or start Ray with `ray start --head`, and further nodes"
            )

    def _check_name(self) -> None:
        """Raises ClusterError if a cluster of this name runs. A cluster that has just been killed
        may still be ending."""
        until_s = time.monotonic() + ENDING_S
        while any(
            each["namespace"] == self._name
            for each in ray.util.list_named_actors(all_namespaces=True)
        ):
            if time.monotonic() > until_s:
                raise ClusterError(
                    f"a cluster named {self._name!r} runs on this Ray: stop it, or choose another"
                    " ray.name"
                )
            time.sleep(LOOK_S)

    def _place(self, group: ActorGroup) -> _Started:
        bundles = [member.bundle for member in group.members]
        name = self._actor_name(group.name)
        return _Started(group, placement_group(bundles, strategy="SPREAD", name=name), {})

    def _wait_placed(self, started: _Started) -> None:
        """Waits without a limit: Ray's autoscaler may have to start machines first."""
        said_s = time.monotonic()
        while not started.placement.wait(LOOK_S):
            if time.monotonic() - said_s > SAY_S:
                said_s = time.monotonic()
                wanted = [member.bundle for member in started.group.members]
                log.info("waiting for room in Ray for %s: %s", started.group.name, wanted)

    def _start_actors(self, started: _Started) -> None:
        for index, member in enumerate(started.group.members):
            kind, arguments = self._kind_of(member)
            needs = dict(member.bundle)
            options = {
                "name": self._actor_name(member.name),
                "namespace": self._name,
                "num_cpus": needs.pop("CPU"),
                "num_gpus": needs.pop("GPU", 0),
                "memory": needs.pop("memory", None),
                "resources": needs,
                "max_restarts": -1,
                "max_task_retries": 0,
                "max_concurrency": CALLS,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(started.placement, index),
            }
            actor = ray.remote(kind).options(**options)
            started.actors[member.name] = actor.remote(
                self._actor_name(member.name), self._environment, *arguments
            )

    def _keep_pools(self) -> None:
        """Keeps a pool on each node that may have vLLM servers. Its actor takes none of Ray's
        resources, so Ray's autoscaler keeps no machine for it."""
        own = self.config.ray
        if not own.pool_bytes:
            return
        fitting = {
            node["NodeID"]
            for node in ray.nodes()
            if node["Alive"] and (not own.gpus or node["Resources"].get("GPU"))
        }
        for node_id in set(self._pools) - fitting:
            del self._pools[node_id]  # Ray ends it with its node
        for node_id in fitting - set(self._pools):
            name = self._actor_name(f"pool-{node_id[:12]}")
            options = {
                "name": name,
                "namespace": self._name,
                "num_cpus": 0,
                "max_restarts": -1,
                "max_concurrency": CALLS,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
            }
            actor = ray.remote(PoolActor).options(**options)
            flags = self.config.tls.flags()
            self._pools[node_id] = actor.remote(
                name, self._environment, self._name, own.pool_bytes, flags
            )

    def _kind_of(self, member: Member) -> tuple[type, tuple[Any, ...]]:
        """The class of a member's actor, and its arguments."""
        config = self.config
        if member.role == HEAD:
            scheme = "https" if config.api.ssl_certfile else "http"
            toml = write_toml(self._own)
            settings = HeadActorSettings(toml, scheme, config.api.host, config.api.port)
            return HeadActor, (settings, self._heads)
        arguments = member.role, config.tls.flags(), self._heads
        if config.ray.vllm_command:
            return VllmActor, (*arguments, config.ray.vllm_command)
        places = getattr(config.vllm, member.role, ())
        if places:
            number = int(member.name.rpartition("-")[2])
            flags = (*config.tls.flags(), "--vllm", places[number])
            return WorkerActor, (member.role, flags, self._heads)
        return WorkerActor, arguments

    def _actor_name(self, name: str) -> str:
        return f"{self._name}/{name}"

    # While it serves

    def leader(self) -> HeadPlace | None:
        """Returns where the leading head serves, or None if no head leads now, or the leading head
        is out of reach."""
        found: HeadPlace | None = self._ask_heads("place")
        return found

    def actors(self) -> dict[str, Any]:
        """The handles of all actors, by the names of their processes."""
        every = [*self._started, *(each for own in self._added.values() for each in own.values())]
        found = {name: actor for started in every for name, actor in started.actors.items()}
        return found | {f"pool-{node_id[:12]}": actor for node_id, actor in self._pools.items()}

    def check_start(self) -> None:
        """Raises ClusterError if a process could not be kept running."""
        for name, actor in self.actors().items():
            with contextlib.suppress(RayError, GetTimeoutError):
                if ray.get(actor.has_failed.remote(), timeout=ASK_S):
                    raise ClusterError(f"{name} ended too often; see the log above")

    def note_started(self) -> None:
        """The cluster serves: from now on Ray and the actors replace whatever ends."""
        for actor in self.actors().values():
            actor.note_started.remote()

    def step(self) -> None:
        """Follows the nodes of Ray, and the numbers of instances that the Conductor wants. Returns
        soon."""
        self._keep_pools()
        if not self.config.conductor.autoscale:
            return
        self._forget_left()
        wanted = self._ask_heads("wanted")
        if wanted is None:
            return
        cluster = self.config.cluster
        least = {Role.PREFILL: cluster.prefill, Role.DECODE: cluster.decode}
        most = self.config.ray.most_instances
        for change in changes(wanted, least, most, self._added):
            own = self._added[change.role]
            for number in change.add:
                log.info("another %s instance is wanted", change.role.value)
                own[number] = self._place(added_group(self.config, change.role, number))
            for number in change.remove:
                self._give_back(own.pop(number))
        self._request()
        self._start_placed()

    def _request(self) -> None:
        """Lets Ray's autoscaler keep machines for all that is wanted."""
        groups = [started.group for started in self._started]
        groups += [each.group for own in self._added.values() for each in own.values()]
        bundles = [member.bundle for group in groups for member in group.members]
        if bundles != self._requested:
            request_resources(bundles=bundles)
            self._requested = bundles

    def _start_placed(self) -> None:
        for own in self._added.values():
            for started in own.values():
                if not started.actors and started.placement.wait(0):
                    self._start_actors(started)

    def _give_back(self, started: _Started) -> None:
        """Ends an instance in an orderly way; its machine may then be ended."""
        log.info("%s is no longer wanted", started.group.name)
        if not started.actors:
            remove_placement_group(started.placement)
        for actor in started.actors.values():
            self._leaving[actor.leave.remote(DRAIN_S)] = started

    def _forget_left(self) -> None:
        if not self._leaving:
            return
        left, _ = ray.wait(list(self._leaving), num_returns=len(self._leaving), timeout=0)
        for reference in left:
            self._end(self._leaving.pop(reference))

    def urls(self) -> list[str]:
        """Returns the addresses at which the heads serve, or will once they lead; a client that
        loses one head tries the next."""
        return [url for url in self._ask_each("url") if url]

    def _ask_heads(self, method: str) -> Any:
        """Returns the first answer that is not None."""
        return next((found for found in self._ask_each(method) if found is not None), None)

    def _ask_each(self, method: str) -> list[Any]:
        """Returns the answers of the heads that are in reach."""
        actors = self.actors()
        handles = [actors[name.rpartition("/")[2]] for name in self._heads]
        found = []
        for reference in [getattr(handle, method).remote() for handle in handles]:
            with contextlib.suppress(RayError, GetTimeoutError):
                found.append(ray.get(reference, timeout=ASK_S))
        return found

    # Stop

    def stop(self) -> None:
        """Ends all processes, the head first, which ends the workers in order. Gives all resources
        back."""
        if not ray.is_initialized():  # else Ray would start, or connect to any other Ray
            return
        every = [*self._started, *(each for own in self._added.values() for each in own.values())]
        self._started, self._added = [], {Role.PREFILL: {}, Role.DECODE: {}}
        every += self._leaving.values()
        self._leaving = {}
        heads = [each for each in every if each.group.name == HEAD]
        with contextlib.suppress(RayError, GetTimeoutError):
            within_s = self.config.api.drain_seconds
            ends = [
                actor.leave.remote(within_s) for each in heads for actor in each.actors.values()
            ]
            ray.get(ends, timeout=within_s + 2 * LEAVE_S)
        # raised also if the heads took too long to start
        with contextlib.suppress(RayError, GetTimeoutError):
            pools = [actor.leave.remote(0.0) for actor in self._pools.values()]
            ray.get(pools, timeout=2 * LEAVE_S)
        for started in every:
            self._end(started)
        for actor in self._pools.values():
            with contextlib.suppress(RayError):
                ray.kill(actor)
        if self._requested:
            request_resources(bundles=[])
        if self._is_ours:
            ray.shutdown()

    def _end(self, started: _Started) -> None:
        for actor in started.actors.values():
            with contextlib.suppress(RayError):
                ray.kill(actor)
        with contextlib.suppress(RayError):
            remove_placement_group(started.placement)
