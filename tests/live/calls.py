"""Makes each call over a new connection, like `httpx.get`, with a longer timeout."""

from __future__ import annotations

import httpx

fresh = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
