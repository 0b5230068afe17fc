"""Errors that end a transfer over one connection. Each text is one line."""

from __future__ import annotations


class TransportError(Exception):
    """The connection failed and cannot be used any more."""


class PeerGoneError(TransportError):
    """The peer closed the connection or died."""


class DeadlineError(TransportError):
    """The peer did not answer, or did not take data, before the deadline."""


class ProtocolError(TransportError):
    """The peer sent a message or data that the protocol does not allow."""
