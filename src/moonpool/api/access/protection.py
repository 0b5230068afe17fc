"""How a server is told to protect itself: keys, certificates, authorities. A setting that cannot be
used ends the start, so the server never runs without the protection."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from moonpool.api.connection.tls import TlsFiles
from moonpool.api.keys import ApiKeys, KeyFileError, read_keys
from moonpool.config.tables import Config
from moonpool.http_client.trust import TlsError
from moonpool.link.tls import PeerTls, PeerTlsError

UNPROTECTED = (KeyFileError, TlsError, PeerTlsError)
"""The errors that these functions raise; the text of each is one line."""


def open_keys(config: Config) -> ApiKeys:
    return read_keys(config.api.api_keys, config.api.api_key_file, os.environ)


def open_tls(config: Config) -> TlsFiles | None:
    """Returns the TLS files of the HTTP port, or None if the port uses no TLS."""
    api = config.api
    files = api.ssl_certfile, api.ssl_keyfile, api.ssl_ca_certs
    return TlsFiles(*files) if api.ssl_certfile else None


def open_peer_tls(config: Config) -> PeerTls | None:
    """Returns the TLS contexts of connections between machines, or None if they use no TLS."""
    own = config.tls
    return PeerTls(own.certfile, own.keyfile, own.ca_certs) if own.certfile else None


def protections(config: Config) -> tuple[Callable[[], object], ...]:
    """Returns functions of which each opens one protection once."""
    return tuple(partial(each, config) for each in (open_keys, open_tls, open_peer_tls))


def check_protection(config: Config) -> None:
    """Opens all protections once, before anything is started."""
    for check in protections(config):
        check()
