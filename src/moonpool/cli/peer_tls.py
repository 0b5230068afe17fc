"""Options of parts that reach other machines: the certificates of mutual TLS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.cli.options import pem_options
from moonpool.cli.output import fail, one_line

if TYPE_CHECKING:
    from moonpool.link.tls import PeerTls

tls_options = pem_options(
    "--cluster-ssl",
    "",
    "Encrypt connections to head and peers; certificate of this machine (PEM).",
    "Authority (PEM) that has signed the certificates of all parts, and of nothing else.",
)
"""Adds the options, as `certfile`, `keyfile` and `ca_certs`."""


def peer_tls(certfile: str, keyfile: str, ca_certs: str) -> PeerTls | None:
    """Returns the TLS contexts, or None without certificates. Ends the command if they cannot be
    used."""
    from moonpool.link.tls import PeerTls, PeerTlsError

    if not (certfile or keyfile or ca_certs):
        return None
    if not certfile or not ca_certs:
        fail("give both --cluster-ssl-certfile and --cluster-ssl-ca-certs, or neither")
    with one_line(PeerTlsError):
        return PeerTls(certfile, keyfile, ca_certs)
