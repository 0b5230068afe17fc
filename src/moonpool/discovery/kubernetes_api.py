"""The part of a Kubernetes API that sources of servers need: lists of objects that are kept up to
date.

A list is read once and then watched from its resource version on, as the API's own clients do. When
the server has forgotten that version (410), or the watch fails, the list is read again.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from moonpool.discovery.endpoint import SourceError
from moonpool.http_client.client import (
    ConnectionFailedError,
    HttpClient,
    TooLargeError,
    header_lines,
)
from moonpool.log_limit import limited_logger
from moonpool.types import MALFORMED

log = limited_logger("moonpool.discovery")

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder in which a pod finds the token, the CA and the namespace of its service account."""
WATCH_S = 300
"""Time after which the server is asked to end a watch, and another one continues."""
SILENCE_S = WATCH_S + 30.0
ANSWER_S = 30.0
AGAIN_S, MOST_AGAIN_S = 0.5, 15.0
MAX_LINE_BYTES = 16 << 20
MAX_LIST_BYTES = 256 << 20
PAGE = 500

PODS = "/api/v1/namespaces/{}/pods"
Object = dict[str, Any]


class ApiServer:
    """The address of the API, and how its clients authenticate. The token is read for each call,
    because it is replaced every hour."""

    def __init__(self, url: str, token_file: Path | None, ca_file: Path | None) -> None:
        """Raises SourceError."""
        self.url = url
        self._token_file = token_file
        try:
            context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        except (OSError, ssl.SSLError) as error:
            raise SourceError(f"the CA of the Kubernetes API, {ca_file}: {error}") from None
        try:
            self._http = HttpClient(url, connect_s=ANSWER_S, tls=context)
        except ValueError as error:
            raise SourceError(f"the Kubernetes API: {error}") from None

    @classmethod
    def of_pod(cls, environment: Mapping[str, str] = os.environ) -> ApiServer:
        """The API of the cluster in which this process runs. Raises SourceError."""
        host, port = (environment.get(f"KUBERNETES_SERVICE_{each}") for each in ("HOST", "PORT"))
        if not host:
            raise SourceError(
                "this is no pod of a Kubernetes cluster (KUBERNETES_SERVICE_HOST is not set): run"
                " `kubectl proxy`, and add &api=http://127.0.0.1:8001 to the source, or give"
                " --kube-url to `moonpool epp`"
            )
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port or 443}", ACCOUNT / "token", ACCOUNT / "ca.crt")

    def close(self) -> None:
        self._http.close()

    def _headers(self) -> bytes:
        if self._token_file is None:
            return b""
        try:
            token = self._token_file.read_text().strip()
        except OSError as error:
            raise KubernetesError(f"the token in {self._token_file}: {error.strerror}") from None
        try:
            return header_lines({"Authorization": f"Bearer {token}"})
        except ValueError:
            raise KubernetesError(f"{self._token_file} holds no token") from None

    async def get(self, path: str, parameters: Mapping[str, Any]) -> Object:
        """Raises KubernetesError."""
        target = f"{path}?{urlencode(parameters)}"
        with _told():
            async with (
                asyncio.timeout(ANSWER_S),
                self._http.stream("GET", target, headers=self._headers()) as response,
            ):
                body = await response.read(MAX_LIST_BYTES)
        _check(response.status, body)
        return _decode(body)

    async def lines(self, path: str, parameters: Mapping[str, Any]) -> AsyncGenerator[bytes]:
        """The lines of a response that does not end soon. Raises KubernetesError."""
        target = f"{path}?{urlencode(parameters)}"
        with _told():
            async with (
                asyncio.timeout(SILENCE_S) as silence,
                self._http.stream("GET", target, headers=self._headers()) as response,
            ):
                if response.status != 200:
                    _check(response.status, await response.read(MAX_LINE_BYTES))
                rest, now_s = b"", asyncio.get_running_loop().time
                async for chunk in response.parts():
                    silence.reschedule(None)
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield line
                    if len(rest) > MAX_LINE_BYTES:
                        raise KubernetesError("it sent an event that is too long")
                    silence.reschedule(now_s() + SILENCE_S)


def own_namespace(environment: Mapping[str, str] = os.environ) -> str:
    """The namespace of this pod; "default" outside of a cluster."""
    given = environment.get("NAMESPACE", "")
    if not given and (ACCOUNT / "namespace").is_file():
        given = (ACCOUNT / "namespace").read_text().strip()
    return given or "default"


class KubernetesError(Exception):
    """A call of the API failed; one line says why. `status`: the HTTP status, or 0 without a
    response."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ObjectList:
    """Follows the objects of one path. `selector`: a label selector; "" means all objects."""

    def __init__(self, server: ApiServer, path: str, selector: str = "", field: str = "") -> None:
        self._server = server
        self._path = path
        self._selects: dict[str, Any] = {}
        if selector:
            self._selects["labelSelector"] = selector
        if field:
            self._selects["fieldSelector"] = field

    async def follow(
        self, update: Callable[[Mapping[str, Object]], None], optional: bool = False
    ) -> None:
        """Calls `update` with all objects by name, at first and after each change, until cancelled.
        `optional`: whether a kind that the API does not have counts as a list without objects."""
        pause_s, said = AGAIN_S, ""
        while True:
            try:
                objects, version = await self._list()
                update(objects)
                pause_s, said = AGAIN_S, ""
                while True:
                    version = await self._watch(objects, version, update)
            except KubernetesError as error:
                if error.status == 404 and optional:
                    update({})
                    pause_s = MOST_AGAIN_S * 4
                elif error.status != 410 and str(error) != said:
                    said = str(error)
                    log.warning("Kubernetes API at %s, %s: %s", self._server.url, self._path, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MOST_AGAIN_S)

    async def check(self) -> None:
        """Reads the list once. Raises KubernetesError."""
        await self._list()

    async def _list(self) -> tuple[dict[str, Object], str]:
        objects: dict[str, Object] = {}
        more: dict[str, Any] = {"limit": PAGE}
        while True:
            page = await self._server.get(self._path, {**self._selects, **more})
            for each in page.get("items") or ():
                objects[_name(each)] = each
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return objects, str(metadata.get("resourceVersion", ""))
            more = {"limit": PAGE, "continue": metadata["continue"]}

    async def _watch(
        self,
        objects: dict[str, Object],
        version: str,
        update: Callable[[Mapping[str, Object]], None],
    ) -> str:
        """Follows one watch to its end, and returns the version that it came to. Raises
        KubernetesError, with status 410 if the version is too old."""
        parameters = {
            **self._selects,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": WATCH_S,
        }
        began_s = asyncio.get_running_loop().time()
        async with aclosing(self._server.lines(self._path, parameters)) as lines:
            async for line in lines:
                if not line.strip():
                    continue
                event = _decode(line)
                kind, found = event.get("type"), event.get("object") or {}
                if kind == "ERROR":
                    code = found.get("code", 0)
                    raise KubernetesError(str(found.get("message", ""))[:200], code)
                version = str((found.get("metadata") or {}).get("resourceVersion", version))
                if kind == "DELETED":
                    objects.pop(_name(found), None)
                elif kind in ("ADDED", "MODIFIED"):
                    objects[_name(found)] = found
                else:
                    continue  # a bookmark, which has only the version
                update(objects)
        if asyncio.get_running_loop().time() - began_s < 1.0:
            await asyncio.sleep(1.0)  # waits, because the server ends each watch at once
        return version


def is_ready(pod: Object) -> bool:
    """Whether requests should go to a pod: it has an address, is ready, and is not told to end."""
    status: Mapping[str, Any] = pod.get("status") or {}
    if (pod.get("metadata") or {}).get("deletionTimestamp") or not status.get("podIP"):
        return False
    conditions = status.get("conditions") or ()
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def _name(found: Object) -> str:
    return str((found.get("metadata") or {}).get("name", ""))


def _decode(raw: bytes) -> Object:
    try:
        found = msgspec.json.decode(raw)
    except MALFORMED as error:
        raise KubernetesError(f"it sent no JSON: {error}") from None
    if not isinstance(found, dict):
        raise KubernetesError("it sent no object")
    return found


def _check(status: int, body: bytes) -> None:
    if status == 200:
        return
    text = ""
    try:
        text = str(msgspec.json.decode(body).get("message", ""))
    except (*MALFORMED, AttributeError):
        pass
    hint = ": give its service account `get`, `list` and `watch`" if status == 403 else ""
    raise KubernetesError(f"it responded with {status} {text[:200]}{hint}".strip(), status)


@contextmanager
def _told() -> Iterator[None]:
    """Raises KubernetesError for a call that fails."""
    try:
        yield
    except (ConnectionFailedError, TooLargeError) as error:
        raise KubernetesError(str(error)[:200]) from None
    except TimeoutError:
        raise KubernetesError("it did not answer in time") from None
