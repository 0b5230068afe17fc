"""The pages of this folder. Each is one file, which sends requests to this server only."""

from __future__ import annotations

from moonpool.api.http_context import HttpContext
from moonpool.pages import whole_page

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
    """Sends one HTML file of this folder; the browser may load nothing from elsewhere."""

    def __init__(self, file_name: str) -> None:
        self._page = whole_page(__package__, file_name).encode()

    async def send(self, context: HttpContext) -> None:
        await context.respond(200, self._page, b"text/html; charset=utf-8", _HEADERS)
