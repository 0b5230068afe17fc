"""Options of parts that reach other machines: the certificates of mutual TLS."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from moonpool.cli.options import not_empty
from moonpool.cli.output import fail, one_line

if TYPE_CHECKING:
    from moonpool.link.tls import PeerTls

F = TypeVar("F", bound=Callable[..., Any])
_OPTIONS = (
    click.option(
        "--cluster-ssl-certfile",
        "certfile",
        default="",
        callback=not_empty,
        metavar="FILE",
        help="Encrypt connections to head and peers; certificate of this machine (PEM).",
    ),
    click.option(
        "--cluster-ssl-keyfile",
        "keyfile",
        default="",
        callback=not_empty,
        metavar="FILE",
        help="Key of that certificate (PEM); in the certificate's file unless given.",
    ),
    click.option(
        "--cluster-ssl-ca-certs",
        "ca_certs",
        default="",
        callback=not_empty,
        metavar="FILE",
        help="Authority (PEM) that has signed the certificates of all parts, and of nothing else.",
    ),
)


def tls_options(command: F) -> F:
    """Adds the options, as `certfile`, `keyfile` and `ca_certs`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def peer_tls(certfile: str, keyfile: str, ca_certs: str) -> PeerTls | None:
    """Returns the contexts; None without certificates. Ends the command if they cannot be used."""
    from moonpool.link.tls import PeerTls, PeerTlsError

    if not (certfile or keyfile or ca_certs):
        return None
    if not certfile or not ca_certs:
        fail("give both --cluster-ssl-certfile and --cluster-ssl-ca-certs, or neither")
    with one_line(PeerTlsError):
        return PeerTls(certfile, keyfile, ca_certs)
