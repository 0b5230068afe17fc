"""Makes certificates and their authority for one test, by the openssl command."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import pytest

from moonpool.link.tls import PeerTls

OPENSSL = shutil.which("openssl")
_FOLDER = "MOONPOOL_TEST_CERTIFICATES"


class Files(NamedTuple):
    """Holds the paths of a part's certificate, its key, and the authority."""

    certfile: str
    keyfile: str
    ca_certs: str

    @property
    def flags(self) -> list[str]:
        return [
            *("--cluster-ssl-certfile", self.certfile),
            *("--cluster-ssl-keyfile", self.keyfile),
            *("--cluster-ssl-ca-certs", self.ca_certs),
        ]


def make_certificates(folder: Path, authority: str, name: str) -> Files:
    """Makes a certificate, and first an authority if the folder has none."""
    if OPENSSL is None:
        pytest.skip("no openssl command makes certificates")
    ca, ca_key = folder / f"{authority}.pem", folder / f"{authority}.key"
    key_kind = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    if not ca.exists():
        _run(f"req -x509 {key_kind} -days 2 -subj /CN={authority} -keyout {ca_key} -out {ca}")
    cert, key, wish = (folder / f"{authority}-{name}.{end}" for end in ("pem", "key", "csr"))
    _run(f"req {key_kind} -subj /CN={name} -keyout {key} -out {wish}")
    _run(f"x509 -req -in {wish} -CA {ca} -CAkey {ca_key} -CAcreateserial -days 2 -out {cert}")
    return Files(str(cert), str(key), str(ca))


@cache
def shared_tls() -> PeerTls:
    """Makes TLS contexts of one part, for all parts of this process and of the processes that it
    starts."""
    found = os.environ.get(_FOLDER)
    if found is None:
        found = mkdtemp(prefix="moonpool-tls-")
        atexit.register(shutil.rmtree, found)
        make_certificates(Path(found), "authority", "part")
        os.environ[_FOLDER] = found
    names = ("authority-part.pem", "authority-part.key", "authority.pem")
    return PeerTls(*(f"{found}/{name}" for name in names))


def _run(line: str) -> None:
    assert OPENSSL is not None
    subprocess.run([OPENSSL, *line.split()], check=True, capture_output=True, timeout=60)
