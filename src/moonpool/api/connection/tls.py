"""TLS of the HTTP port: reads certificate and key, and reads them again when they change."""

from __future__ import annotations

import logging
import os
import ssl

from moonpool.http_client.trust import TlsError, no_password, require_authority

log = logging.getLogger("moonpool")


class TlsFiles:
    """A certificate chain and its key (PEM). `context` serves connections with this chain and
    key."""

    def __init__(self, certfile: str, keyfile: str = "", ca_certs: str = "") -> None:
        """An empty `keyfile` means that the key is in `certfile`. With `ca_certs`, a client must
        show a certificate that one of these authorities has signed. Raises TlsError."""
        self._certfile, self._keyfile, self._ca_certs = certfile, keyfile, ca_certs
        self._seen = self._stamps()
        self.context = self._load()

    def renew(self) -> None:
        """Loads changed files for new connections. Unusable files are logged, and the old ones stay
        in use."""
        seen = self._stamps()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._load()  # loads into a separate context, so that half of a new pair is never used
            self._load_into(self.context)
        except TlsError as error:
            log.warning("the former certificate stays in use: %s", error)
        else:
            log.info("new connections use the changed certificate %s", self._certfile)

    def _stamps(self) -> list[tuple[int, int, int]]:
        """Returns inode, modification time in ns and size of each file; zeros for a missing
        file."""
        stamps = []
        for path in filter(None, (self._certfile, self._keyfile, self._ca_certs)):
            try:
                stat = os.stat(path)
                stamps.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
            except OSError:
                stamps.append((0, 0, 0))
        return stamps

    def _load(self) -> ssl.SSLContext:
        for flag, path in (
            ("--ssl-certfile", self._certfile),
            ("--ssl-keyfile", self._keyfile),
            ("--ssl-ca-certs", self._ca_certs),
        ):
            try:
                if path:
                    with open(path, "rb"):
                        pass
            except OSError as error:
                raise TlsError(f"cannot read {flag} {path}: {error.strerror}") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load_into(context)
        return context

    def _load_into(self, context: ssl.SSLContext) -> None:
        """Raises TlsError."""
        if self._ca_certs:
            try:
                context.load_verify_locations(self._ca_certs)
            except OSError as error:  # ssl.SSLError is a kind of OSError
                text = f"cannot use --ssl-ca-certs {self._ca_certs}: {error}; give a PEM file"
                raise TlsError(text) from None
            require_authority(context, f"--ssl-ca-certs {self._ca_certs}")
            context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self._certfile, self._keyfile or None, no_password)
        except (OSError, ValueError) as error:
            where = f"{self._certfile} with --ssl-keyfile {self._keyfile or self._certfile}"
            text = f"cannot use --ssl-certfile {where}: {error}; give PEM files that fit each other"
            raise TlsError(text) from None
