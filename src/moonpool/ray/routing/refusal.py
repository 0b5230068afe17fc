"""How a call that the Conductor refuses ends in Serve."""

from __future__ import annotations

from ray.serve.exceptions import BackPressureError

from moonpool.ray.replicas.replica_conductor import RefusedCall

STATUSES = (429, 503)
"""Serve's proxies make an Internal Server Error of every other one."""


class CallRefusedError(BackPressureError):  # type: ignore[misc]
    """Serve answers with its status, its reason and Retry-After, as to other back pressure."""

    def __init__(self, reason: str, message: str, status: int, retry_after_s: float | None) -> None:
        super().__init__(0, 0, status, retry_after_s)
        self.args = (reason, message, status, retry_after_s)  # what pickling makes it again of
        self.reason = reason
        self._message = f"{reason}: {message}"


def refusal(refused: RefusedCall) -> CallRefusedError:
    why = refused.refusal
    status = why.status if why.status in STATUSES else 429
    return CallRefusedError(why.reason, why.message, status, why.retry_after_s)
