"""Certificates for servers with TLS, made by the `openssl` program."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from aworld_runtime.processes import HOST
from tests.services import missing

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class Certificate:
    """Proves to be somebody, to whoever trusts the authority that issued it."""

    file: Path
    key: Path


@dataclass(frozen=True)
class Authority(Certificate):
    """Issues certificates. `file` is what its friends trust."""

    @classmethod
    def found(cls, folder: Path) -> Self:
        """A new one, with its files in `folder`."""
        if shutil.which("openssl") is None:
            missing("openssl", "install the openssl program")
        folder.mkdir(parents=True, exist_ok=True)
        made = cls(folder / "ca.crt", folder / "ca.key")
        _openssl("req", "-x509", *_NEW_KEY, "-keyout", made.key, "-out", made.file, "-days", 2,
                 "-subj", "/CN=tests")  # fmt: skip
        return made

    def issue(self, name: str, *, address: str = HOST, days: int = 2) -> Certificate:
        """For the server at `address`, or a client of this name; of negative days: expired."""
        folder = self.file.parent
        made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
        request = folder / f"{name}.csr"
        _openssl("req", "-new", *_NEW_KEY, "-keyout", made.key, "-out", request,
                 "-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{address}")  # fmt: skip
        _openssl("x509", "-req", "-in", request, "-CA", self.file, "-CAkey", self.key,
                 "-CAcreateserial", "-out", made.file, "-days", days,
                 "-copy_extensions", "copyall")  # fmt: skip
        return made


def tls_options(authority: Authority, certificate: Certificate, port: int) -> dict[str, str]:
    """What a Redis server needs to be told."""
    return {
        "tls-port": str(port),
        "tls-cert-file": str(certificate.file),
        "tls-key-file": str(certificate.key),
        "tls-ca-cert-file": str(authority.file),
        "tls-auth-clients": "optional",
    }


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=10)
