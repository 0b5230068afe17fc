"""Calls with a connection of their own each, as `httpx.get` makes them. That would read all
certificates of this machine for each call, which takes longer than the call."""

from __future__ import annotations

import httpx

fresh = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))
