"""Calls of a running head's routes, for commands: each failure ends the command with one line."""

from __future__ import annotations

from typing import Any

from moonpool.cli.output import fail
from moonpool.cli.watch.cluster_events import NO_KEY, bearer_key

_TIMEOUT_S = 60.0


class ClusterClient:
    """The head at one URL."""

    def __init__(self, url: str, api_key: str | None, ca_file: str = "") -> None:
        import httpx

        from moonpool.api.connection.tls import TlsError, trusting_context

        self.url = url.rstrip("/")
        key = bearer_key(api_key)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            verify = trusting_context(ca_file) if self.url.startswith("https:") else True
        except TlsError as error:
            fail(str(error))
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT_S, verify=verify)

    def get(self, path: str) -> dict[str, Any]:
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        import httpx

        tries = 2 if method == "GET" else 1  # the head may just have given way to the next one
        while True:
            tries -= 1
            try:
                answer = self._client.request(method, self.url + path, json=body)
                break
            except (httpx.RemoteProtocolError, httpx.ReadError) as error:
                if not tries:
                    fail(f"{self.url} broke off: {error}")
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                fail(f"no server answers at {self.url}: {error}; start one or correct the URL")
        try:
            found: Any = answer.json()
            message = str(found["error"]["message"]) if answer.is_error else ""
        except (ValueError, KeyError, TypeError):
            found = None
        if not isinstance(found, dict) or answer.status_code == 404:
            fail(f"{self.url} is no moonpool server: correct the URL")
        if message:
            fail(NO_KEY if answer.status_code == 401 else message)
        return found
