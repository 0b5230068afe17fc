"""Posts to a webhook how many instances are wanted. Numbers that newer ones replace are not sent
any more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from moonpool.conductor.actions import InstancesWanted
from moonpool.log_limit import limited_logger

if TYPE_CHECKING:
    import httpx

log = limited_logger("moonpool.head")

TIMEOUT_S = 5.0
RETRY_S = 5.0


class WantedWebhook:
    """Posts {"wanted_instances": {"prefill": P, "decode": D}}. A failed post is repeated until it
    succeeds or newer numbers replace it."""

    def __init__(self, url: str) -> None:
        """`url`: the URL of the webhook, or "" for none."""
        self._url = url
        # imported here, so that a head without a webhook starts sooner, and no call has to wait
        # later
        if url:
            import httpx  # noqa: F401
        self._newest: InstancesWanted | None = None
        self._task: asyncio.Task[None] | None = None

    def post(self, wanted: InstancesWanted) -> None:
        """Returns at once; an event loop must be running."""
        if not self._url:
            return
        self._newest = wanted
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._post_newest())

    def close(self) -> None:
        """Drops numbers that are not posted yet."""
        if self._task is not None:
            self._task.cancel()

    async def _post_newest(self) -> None:
        import httpx

        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            while self._newest is not None:
                wanted = self._newest
                error = await self._post_once(client, wanted)
                if error:
                    log.warning("the autoscale webhook does not answer: %s", error)
                    await asyncio.sleep(RETRY_S)
                elif self._newest is wanted:
                    self._newest = None

    async def _post_once(self, client: httpx.AsyncClient, wanted: InstancesWanted) -> str:
        """Returns the error, or "" if the post succeeded."""
        import httpx

        numbers = {"prefill": wanted.prefill, "decode": wanted.decode}
        try:
            answer = await client.post(self._url, json={"wanted_instances": numbers})
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__
        return "" if answer.is_success else f"status {answer.status_code}"
