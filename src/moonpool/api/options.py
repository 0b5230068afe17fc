"""What the operator may choose about the HTTP layer. One frozen value, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """`api_keys` maps a bearer key to the tenant it belongs to; empty: no key is asked for.

    `served_names`: names clients may use for the model; empty: the model card's own id.
    """

    api_keys: Mapping[str, str] = field(default_factory=dict)
    served_names: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    max_choices: int = 128  # prompts x n of one call
    max_logprobs: int = 20
    thread_above_chars: int = 16_384  # longer texts are tokenised off the event loop
    body_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_choices", "thread_above_chars", "body_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"api.{name} must be above 0, not {getattr(self, name)}")
        for key, tenant in self.api_keys.items():
            if not key or not key.isascii() or any(character.isspace() for character in key):
                raise ValueError("an API key must be non-empty ASCII text without spaces")
            if not tenant or "/" in tenant:
                raise ValueError(f"tenant {tenant!r} must be non-empty and must not hold '/'")
