"""The configuration of TLS between the parts of a cluster."""

from __future__ import annotations

from typing import Annotated

from moonpool.config.schema import about
from moonpool.types import Struct


class TlsConfig(Struct, frozen=True):
    """Certificates of connections between machines. Workers have flags of the same names, because
    each machine has files of its own."""

    certfile: Annotated[
        str,
        about(
            "Encrypt connections between head, workers and peers; certificate of this machine"
            " (PEM).",
            "--cluster-ssl-certfile",
            metavar="FILE",
            protects=True,
        ),
    ] = ""
    keyfile: Annotated[
        str,
        about(
            "Key of that certificate (PEM); in the certificate's file unless given.",
            "--cluster-ssl-keyfile",
            metavar="FILE",
            protects=True,
        ),
    ] = ""
    ca_certs: Annotated[
        str,
        about(
            "Authority (PEM) that has signed the certificates of all parts, and of nothing else.",
            "--cluster-ssl-ca-certs",
            metavar="FILE",
            protects=True,
        ),
    ] = ""

    def flags(self) -> tuple[str, ...]:
        """Returns the same as flags of a worker on this machine."""
        given = {"certfile": self.certfile, "keyfile": self.keyfile, "ca-certs": self.ca_certs}
        pairs = [(f"--cluster-ssl-{name}", path) for name, path in given.items() if path]
        return tuple(word for pair in pairs for word in pair)
