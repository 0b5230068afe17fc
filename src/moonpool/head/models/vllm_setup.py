"""Sets up the workers of vLLM servers: the model that a server offers is read before its worker
gets the settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from moonpool.config.tables import ConfigError
from moonpool.head.cluster_error import ClusterError
from moonpool.head.models.served_model import ServedModel
from moonpool.head.models.served_models import ServedModels
from moonpool.head.worker_link import WorkerLink
from moonpool.log_limit import limited_logger
from moonpool.protocol.frames import Setup, TurnedAway
from moonpool.protocol.model_offer import ModelOffer

log = limited_logger("moonpool.head")
NO_OFFER = "it does not say which model it serves: its release is older than the head's"


class VllmSetups:
    def __init__(
        self,
        served: ServedModels,
        setup: Callable[[], Setup],
        on_failed: Callable[[WorkerLink, str], None],
    ) -> None:
        self._served = served
        self._setup = setup
        self._on_failed = on_failed
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, link: WorkerLink, offer: ModelOffer | None) -> None:
        """Sends the settings to a worker that has applied, or rejects it."""
        task = asyncio.create_task(self._set_up(link, offer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _set_up(self, link: WorkerLink, offer: ModelOffer | None) -> None:
        try:
            model = await self._model(link, offer)
        except (ClusterError, ConfigError) as error:
            self._turn_away(link, str(error))
            return
        except Exception as error:  # an error of the files that no check foresaw
            log.exception("the model of %s cannot be read", link.instance_id)
            found = f"{type(error).__name__}: {error}"
            self._turn_away(link, f"its model cannot be read: {found}; the head's log has more")
            return
        setup = self._setup()
        named = msgspec.structs.replace(setup.model, name=model.key)
        link.channel.send(msgspec.structs.replace(setup, model=named))

    def _turn_away(self, link: WorkerLink, message: str) -> None:
        self._on_failed(link, message)
        link.channel.send(TurnedAway(message=message))
        link.channel.close(f"rejected: {message}")

    async def _model(self, link: WorkerLink, offer: ModelOffer | None) -> ServedModel:
        """Raises ClusterError and ConfigError."""
        if offer is not None:
            return await self._served.of_offer(link.instance_id, offer)
        if self._served.default is None:
            raise ClusterError(NO_OFFER)
        return self._served.default
