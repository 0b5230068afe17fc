"""Errors of the API in their one wire format: OpenAI's error object."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moonpool.api.serving_backend import RequestRefused

Headers = Sequence[tuple[bytes, bytes]]
NO_RETRY = (b"x-should-retry", b"false")
"""Client libraries send a request again after errors of the server, unless they are told not to."""
_NOT_TRIED_AGAIN = ("head_failed", "instances_ended")


class ApiError(Exception):
    """An error response. `param` names the field at fault, and `code` the reason.

    `projection` holds the numbers behind a rejection. `is_counted`: whether the head has counted
    it, as in `RequestRefused`.
    """

    is_counted = False

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = "invalid_value",
        headers: Headers = (),
        projection: Mapping[str, float] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers
        self.projection = projection

    def payload(self) -> bytes:
        error: dict[str, Any] = {
            "message": self.message,
            "type": _type_of(self.status),
            "param": self.param,
            "code": self.code,
        }
        if self.projection:
            error["projection"] = self.projection
        return msgspec.json.encode({"error": error})


class ClientGoneError(Exception):
    """The client closed the connection, so no response can be sent."""


def from_refused(refused: RequestRefused) -> ApiError:
    refusal = refused.refusal
    headers: list[tuple[bytes, bytes]] = []
    if refusal.retry_after_s is not None or refusal.status in (429, 503):
        retry_after_s = refusal.retry_after_s or 1.0
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(min(retry_after_s, 86_400.0)))))
    if refusal.reason in _NOT_TRIED_AGAIN:
        headers.append(NO_RETRY)
    error = ApiError(
        refusal.message,
        status=refusal.status,
        code=refusal.reason,
        headers=headers,
        projection=refusal.projection,
    )
    error.is_counted = refused.is_counted
    return error


def internal_error(request_id: str) -> ApiError:
    message = f"Internal error. The server's log has the cause under request {request_id}."
    return ApiError(message, status=500, code="internal_error")


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    if status == 503:
        return "service_unavailable_error"
    if status == 504:
        return "timeout_error"
    return "server_error" if status >= 500 else "invalid_request_error"
