"""The HTTP server of a head that answers calls itself."""

from __future__ import annotations

import asyncio

from moonpool.api.app import http_server, make_app
from moonpool.api.connection.tls import TlsFiles
from moonpool.api.models.model_apis import ModelApis
from moonpool.api.serving_backend import ApiOptions
from moonpool.head.head import ClusterHead
from moonpool.head.supervisor_link import Inheritance, SupervisorLink


class OwnCalls:
    """From `begin` until `hand_over` or `end`."""

    def __init__(
        self,
        link: SupervisorLink,
        head: ClusterHead,
        options: ApiOptions,
        inherited: Inheritance,
        tls: TlsFiles | None,
    ) -> None:
        self._link = link
        self._head = head
        self._inherited = inherited
        self._models = ModelApis(head, options)
        answers = head.standbys.answers
        answers.enders = link.enders
        head.work.mark = link.mark
        for kept in inherited.cut_answers:
            answers.adopt(kept)
        app = make_app(head, options, self._models)
        self._server = http_server(app, tls=tls, keeper=link, answers=answers, mark=link.mark)

    async def begin(self) -> asyncio.Task[None]:
        """Continues the answers of an earlier head, and accepts calls. Returns what runs."""
        for received, sock in self._inherited.answers:
            await self._server.resume(sock, received)
        for sock in self._inherited.connections:
            await self._server.adopt(sock)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._inherited.http]))
        return self._serving

    async def hand_over(self, calls_s: float) -> None:
        """Hands over to another head."""
        await self._server.hand_over(self._link.pass_on, calls_s)
        self._models.close()

    async def end(self) -> None:
        self._server.should_exit = True
        await asyncio.wait([self._serving])
        self._models.close()
