"""Why a request is not served: one value in the Conductor's action, on the wire and in logs (pure).

The exception that carries it to a client is `api.serving_backend.RequestRefused`.
"""

from __future__ import annotations

import re

import msgspec

_SHORT_FORM = re.compile(r"\b(ttft|tbt|slo|ssd)\b")


class Refusal(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A request is rejected, or its answer breaks off."""

    status: int
    """The HTTP status: 422 (not even an idle cluster could meet the SLO), 429 (SLO or fair share),
    503 (no capacity, instance lost), 504 (deadline), 400."""
    reason: str  # for machines
    message: str  # for people
    retry_after_s: float | None = None
    projection: dict[str, float] | None = None
    """The numbers behind the refusal, such as `predicted_ttft_s` and `limit_ttft_s`."""


def reason_words(reason: str) -> str:
    """Returns a reason in words: "TTFT SLO" for "ttft_slo"."""
    return _SHORT_FORM.sub(lambda found: found[0].upper(), reason.replace("_", " "))
