"""Which servers a client trusts over https, and how it proves its own identity."""

from __future__ import annotations

import os
import ssl

CLIENT_CERT_VARIABLE = "MOONPOOL_CLIENT_CERT"
"""A PEM file with the certificate and key of commands that ask a server by HTTPS."""


class TlsError(ValueError):
    """Certificate or key cannot be used; one line says which file and why."""


def require_authority(context: ssl.SSLContext, what: str) -> None:
    """Raises TlsError if the context has no certificate: a file may be valid PEM and hold none."""
    if not context.cert_store_stats()["x509"]:
        raise TlsError(f"{what} holds no certificate: give a PEM file with one")


def no_password() -> str:
    """Called for an encrypted key, in place of a question on the terminal."""
    raise ValueError("the key is encrypted; store it without a passphrase")


def untrusted_hint(error: Exception) -> str:
    """Returns what a user can do about a refused certificate, or "" for another error."""
    if "CERTIFICATE_VERIFY_FAILED" not in str(error):
        return ""
    return "give the certificate of its authority with --ca-file"


def trusting_context(ca_file: str = "") -> ssl.SSLContext:
    """Returns a client's context, which trusts `ca_file` (PEM), or without it the system's. The
    context shows the certificate of CLIENT_CERT_VARIABLE to a server that asks for one.

    Raises TlsError.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise TlsError(f"cannot use --ca-file {ca_file}: {error.strerror or error}") from None
    if ca_file:
        require_authority(context, f"--ca-file {ca_file}")
    own = os.environ.get(CLIENT_CERT_VARIABLE)
    if own is not None and not own.strip():
        text = f"{CLIENT_CERT_VARIABLE} is set and empty: name a file, or unset the variable"
        raise TlsError(text)
    try:
        if own is not None:
            context.load_cert_chain(own, None, no_password)
    except (OSError, ValueError) as error:
        text = f"cannot use {CLIENT_CERT_VARIABLE}={own}: {error}; it needs certificate and key"
        raise TlsError(text) from None
    return context
