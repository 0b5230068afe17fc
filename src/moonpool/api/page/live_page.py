"""The live page at `/`, and the stream of server-sent events that it shows.

All viewers of one tenant share a frame, which is computed at most once in half of `FRAME_S`, and
only while a viewer is connected.
"""

from __future__ import annotations

import asyncio

import msgspec

from moonpool.api.cluster_view import CallBackend, ClusterView
from moonpool.api.errors import ApiError
from moonpool.api.http_context import HttpContext
from moonpool.api.sharing.shared_buffer import SharedBuffer
from moonpool.pages import whole_page

FRAME_S = 1.0
MAX_VIEWERS = 32


class LivePage:
    """Serves the events of the page for one frontend."""

    def __init__(self, backend: CallBackend, view: ClusterView) -> None:
        self._backend, self._view = backend, view
        self._viewers = SharedBuffer(MAX_VIEWERS)
        self._frames: dict[str | None, tuple[float, bytes]] = {}
        self._computing = asyncio.Lock()

    async def events(self, context: HttpContext) -> None:
        """Sends a frame each second until the client or the server ends.

        Raises `ApiError` with 503 if there are too many viewers.
        """
        tenant = None if context.is_operator else context.tenant
        viewers, party = self._viewers, context.party
        if not viewers.take(party):
            text = (
                f"{viewers.taken} clients watch this server already, {viewers.taken_by(party)} of"
                " them yours. Close one of them."
            )
            after = ((b"retry-after", b"10"),)
            raise ApiError(text, status=503, code="too_many_viewers", headers=after)
        try:
            async with context.watch():
                await context.start_events()
                while not self._backend.is_stopping():
                    await context.send_events(await self._shared_frame(tenant))
                    await asyncio.sleep(FRAME_S)
                await context.end_events(b"event: end\ndata: {}\n\n")
        finally:
            viewers.release(party)
            if not viewers.taken:
                self._frames.clear()

    async def _shared_frame(self, tenant: str | None) -> bytes:
        async with self._computing:  # awaits the head, which may be another process
            return await self._frame(tenant)

    async def _frame(self, tenant: str | None) -> bytes:
        now = self._backend.now()
        made_s, frame = self._frames.get(tenant, (float("-inf"), b""))
        if now - made_s < FRAME_S / 2:
            return frame
        described = await self._view.live_view(tenant)
        frame = b"data: %s\n\n" % msgspec.json.encode(described)
        self._frames[tenant] = now, frame
        return frame


_POLICY = (
    b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
    b" connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    b" frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


class HtmlPage:
    """Sends one HTML file of this folder; the browser may load nothing from other servers."""

    def __init__(self, file_name: str) -> None:
        self._page = whole_page(__package__, file_name).encode()

    async def send(self, context: HttpContext) -> None:
        await context.respond(200, self._page, b"text/html; charset=utf-8", _HEADERS)
