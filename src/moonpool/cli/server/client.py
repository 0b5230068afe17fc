"""Calls of a running head's routes, for commands: each failure ends the command with one line."""

from __future__ import annotations

from typing import Any

from moonpool.cli.output import fail, one_line
from moonpool.cli.server.address import NO_KEY, Server

_TIMEOUT_S = 120.0


class ClusterClient:
    """A head that a command asks."""

    def __init__(self, server: Server) -> None:
        from moonpool.http_client.trust import TlsError

        self.server = server
        self.url = server.url
        with one_line(TlsError):
            self._client = server.open_client(_TIMEOUT_S)

    def get(self, path: str) -> dict[str, Any]:
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._ask("POST", path, body)

    def get_bytes(self, path: str) -> bytes:
        """Returns the body of an answer, which need not be JSON."""
        answer = self._request("GET", path, None)
        if answer.status_code != 200:
            self._refused(answer)
        content: bytes = answer.content
        return content

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        answer = self._request(method, path, body)
        if answer.is_error:
            self._refused(answer)
        found = _json(answer)
        if not isinstance(found, dict):
            fail(f"{self.url} is no moonpool server: correct the URL")
        return found

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        import httpx

        # a second try, because the head may just have been replaced
        tries = 2 if method == "GET" else 1
        while True:
            tries -= 1
            try:
                return self._client.request(method, self.url + path, json=body)
            except (httpx.RemoteProtocolError, httpx.ReadError) as error:
                if not tries:
                    hint = "; is it https?" if self.url.startswith("http:") else ""
                    fail(f"{self.url} broke off: {error}{hint}")
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                fail(self.server.unreachable(error))

    def _refused(self, answer: Any) -> None:
        """Ends the command with the reason of an answer that is an error."""
        if answer.status_code == 401:
            fail(NO_KEY)
        try:
            message = str(_json(answer)["error"]["message"])
        except (KeyError, TypeError):
            message = ""
        if not message or answer.status_code == 404:
            status = answer.status_code
            fail(f"{self.url} is no moonpool server (status {status}): correct the URL")
        fail(message)


def _json(answer: Any) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None
