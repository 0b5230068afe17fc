"""The base class of the endpoints that compute with one model."""

from __future__ import annotations

from moonpool.api.body_pool import BodyReader
from moonpool.api.http_context import ActiveCalls
from moonpool.api.rate_limits import RateLimits
from moonpool.api.serving_backend import ApiOptions, ModelBackend


class ModelEndpoint:
    """Serves calls of one model through one frontend."""

    def __init__(
        self,
        backend: ModelBackend,
        options: ApiOptions,
        bodies: BodyReader,
        active: ActiveCalls,
        rates: RateLimits,
    ) -> None:
        self._backend = backend
        self._options = options
        self._bodies = bodies
        self._active = active
        self._rates = rates

    @property
    def _name(self) -> str:
        """Returns the model's own name, which may change when its first vLLM server joins."""
        return self._options.names(self._backend.card)[0]
