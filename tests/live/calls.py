"""Calls with a connection of their own each, as `httpx.get` makes them, with more patience."""

from __future__ import annotations

import httpx

fresh = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
