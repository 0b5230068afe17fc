"""Errors that end a transfer over one connection. The text of each error is one line."""

from __future__ import annotations


class TransportError(Exception):
    """The connection failed and cannot be used any more."""


class PeerGoneError(TransportError):
    """The peer closed the connection or died."""


class DeadlineError(TransportError):
    """The peer did not respond, or did not accept data, before the deadline."""


class ProtocolError(TransportError):
    """The peer sent a message or data that the protocol does not allow."""
