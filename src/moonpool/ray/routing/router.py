"""The request router for Ray Serve: it asks the deployment's Conductor for each call.

    RequestRouterConfig(request_router_class="moonpool.ray.ConductorRouter")

A router that cannot reach its Conductor falls back to Serve's power of two choices, logs that, and
tries again after a while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.context import _get_global_client
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from moonpool.api.errors import ApiError
from moonpool.api.program_identity import program_of
from moonpool.ray.replicas.calls import hints_of, read_call
from moonpool.ray.replicas.replica_conductor import Decision, RefusedCall
from moonpool.ray.replicas.settings import RouterSettings
from moonpool.ray.routing.conductor_actor import CALLS, ConductorActor, Sighting
from moonpool.ray.routing.observed_replica import ObservedReplica
from moonpool.types import ProgramContext

log = logging.getLogger("ray.serve")

NAMESPACE = "moonpool"
FLUSH_S = 0.01
"""How long sightings are gathered before they are sent."""
AGAIN_S = 2.0
"""Time from a Conductor that is out of reach to the next attempt."""
MOST_TASKS = 4096
MAX_SIGHTINGS = 65_536
"""While the Conductor is out of reach, further sightings are dropped; the Conductor then counts the
calls as lost.
"""


class AskingRouter(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """`request_router_kwargs` are the fields of `RouterSettings`."""

    def initialize_state(self, **settings: Any) -> None:
        """Raises ValueError for a setting that is unknown or of a wrong type."""
        self._settings = _settings_of(settings)
        self._reading: asyncio.Task[None] | None = None
        self._conductor: Any = None
        self._silent_until_s = 0.0
        self._is_falling_back = False
        self._placed: dict[str, str] = {}  # maps a call to its replica until the call is sent
        self._sightings: list[tuple[float, Sighting]] = []
        self._lost: list[str] = []
        self._flushing: asyncio.Task[None] | None = None

    @property
    def max_num_routing_tasks(self) -> int:
        """Each call is placed by a task of its own, which may wait for room."""
        return MOST_TASKS

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        return ObservedReplica(replica_info, self._on_tokens)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return await self._choose_two(candidate_replicas, pending_request)
        pending_request.routing_context.should_backoff = True
        by_name = {_name_of(each.replica_id): each for each in candidate_replicas}
        call_id = pending_request.metadata.internal_request_id
        name = self._placed.get(call_id)
        if name is None or name not in by_name:
            decision = await self._ask(pending_request, list(by_name))
            if decision is None:
                return await self._choose_two(candidate_replicas, pending_request)
            if isinstance(decision, RefusedCall):
                if not pending_request.future.done():
                    pending_request.future.set_exception(refusal(decision))
                return [candidate_replicas]  # Serve then notices that the call has ended
            name = self._placed[call_id] = decision.replica
        return [[by_name[name]]] if name in by_name else []

    async def _choose_two(
        self, candidates: list[RunningReplica], pending: PendingRequest | None
    ) -> list[list[RunningReplica]]:
        found: list[list[RunningReplica]] = await super().choose_replicas(candidates, pending)
        return found

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self._placed.pop(pending_request.metadata.internal_request_id, None)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._placed.pop(internal_request_id, None)
        name = _name_of(replica_id)
        self._see(Sighting(internal_request_id, has_ended=True, replica=name))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._lost.append(_name_of(replica_id))
        self._start_flush()

    def _on_tokens(self, call_id: str, num_tokens: int) -> None:
        """Called by the loop, or the thread, of whoever reads the answer."""
        sighting = Sighting(call_id, num_tokens=num_tokens)
        self._event_loop.call_soon_threadsafe(self._see, sighting)

    # The Conductor

    async def _ask(self, pending: PendingRequest, replicas: list[str]) -> Decision | None:
        """Returns None if there is no Conductor to ask."""
        if time.monotonic() < self._silent_until_s:
            return None
        metadata = pending.metadata
        call = read_call(
            metadata.internal_request_id,
            pending.args,
            pending.kwargs,
            metadata.multiplexed_model_id,
        )
        call = msgspec.structs.replace(call, program=_program_of(pending))
        try:
            if self._conductor is None:
                self._conductor = await asyncio.to_thread(self._find)
            decision: Decision = await self._conductor.choose.remote(call, replicas)
        except (RayError, ValueError) as error:
            self._fall_back(error)
            return None
        except asyncio.CancelledError:  # the client has left while the call waited for its place
            self._see(Sighting(call.call_id, has_failed=True))
            raise
        if self._is_falling_back:
            self._is_falling_back = False
            log.warning("moonpool: the Conductor of %s is back", self._deployment_id)
        return decision

    def _find(self) -> Any:
        deployment = self._deployment_id
        name = f"conductor/{deployment.app_name}/{deployment.name}"
        options = {
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": -1,
            "max_concurrency": CALLS,
        }
        actor = ray.remote(ConductorActor).options(**options).remote(self._settings)
        actor.adopt.remote(self._settings)  # the actor may have been made with earlier settings
        return actor

    # Settings that change

    def update_backoff_params(self, *arguments: Any, **named: Any) -> None:
        """Serve calls this method whenever the deployment's configuration has changed."""
        super().update_backoff_params(*arguments, **named)
        self._event_loop.call_soon_threadsafe(self._start_reading)

    def _start_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._reading = self._event_loop.create_task(self._read_settings())

    async def _read_settings(self) -> None:
        """Reads the settings again, because Serve makes no new router for new
        `request_router_kwargs`."""
        try:
            settings = _settings_of(await asyncio.to_thread(self._newest_kwargs))
        except (RayError, KeyError, ValueError) as error:
            log.warning("moonpool: %s keeps its settings: %s", self._deployment_id, error)
            return
        if settings == self._settings:
            return
        self._settings = settings
        log.info("moonpool: %s has other settings now: %s", self._deployment_id, settings)
        conductor = self._conductor
        if conductor is not None:
            try:
                await conductor.adopt.remote(settings)
            except RayError as error:
                self._fall_back(error)

    def _newest_kwargs(self) -> dict[str, Any]:
        """Raises RayError, KeyError if there is no such deployment any more."""
        own = self._deployment_id
        client = _get_global_client()
        info, _ = client.get_deployment_info(own.name, own.app_name)
        return dict(info.deployment_config.request_router_config.request_router_kwargs or {})

    def _fall_back(self, error: Exception) -> None:
        self._conductor = None
        self._silent_until_s = time.monotonic() + AGAIN_S
        if not self._is_falling_back:
            self._is_falling_back = True
            log.warning(
                "moonpool: the Conductor of %s is out of reach (%s): power of two choices places"
                " its calls until it is back",
                self._deployment_id,
                str(error).partition("\n")[0] or type(error).__name__,
            )

    # Sightings

    def _see(self, sighting: Sighting) -> None:
        if len(self._sightings) < MAX_SIGHTINGS:
            self._sightings.append((time.monotonic(), sighting))
        self._start_flush()

    def _start_flush(self) -> None:
        if self._flushing is None or self._flushing.done():
            self._flushing = self._event_loop.create_task(self._flush())

    async def _flush(self) -> None:
        while self._sightings or self._lost:
            await asyncio.sleep(FLUSH_S)
            found, self._sightings = self._sightings, []
            lost, self._lost = self._lost, []
            if self._conductor is None:
                return
            now = time.monotonic()
            aged = [msgspec.structs.replace(each, age_s=now - at) for at, each in found]
            try:
                await self._conductor.see.remote(aged, lost)
            except (RayError, ValueError) as error:
                self._fall_back(error)
                return


def _settings_of(given: dict[str, Any]) -> RouterSettings:
    """Raises ValueError for a setting that is unknown or of a wrong type."""
    try:
        return msgspec.convert(given, RouterSettings)
    except msgspec.ValidationError as error:
        raise ValueError(f"request_router_kwargs of ConductorRouter: {error}") from None


def _name_of(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)


def _program_of(pending: PendingRequest) -> ProgramContext | None:
    """Which program (agent) a call belongs to: by its body, else by Serve's session. A call with
    invalid fields names no program; the deployment refuses it."""
    session = getattr(pending.metadata, "session_id", "")
    headers = {b"x-session-id": session.encode()} if session else {}
    try:
        return program_of(headers, *hints_of(pending.args, pending.kwargs))
    except ApiError:
        return None


STATUSES = (429, 503)
"""The statuses that Serve's proxies pass on; they turn every other status into an Internal Server
Error."""


class CallRefusedError(BackPressureError):  # type: ignore[misc]
    """Serve answers with its status, its reason and Retry-After, as to other back pressure."""

    def __init__(self, reason: str, message: str, status: int, retry_after_s: float | None) -> None:
        super().__init__(0, 0, status, retry_after_s)
        # pickle makes the error again from these arguments
        self.args = (reason, message, status, retry_after_s)
        self.reason = reason
        self._message = f"{reason}: {message}"


def refusal(refused: RefusedCall) -> CallRefusedError:
    why = refused.refusal
    status = why.status if why.status in STATUSES else 429
    return CallRefusedError(why.reason, why.message, status, why.retry_after_s)
