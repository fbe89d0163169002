"""Certificates of authorities of our own, for tests of TLS."""

from __future__ import annotations

from pathlib import Path

from trustme import CA, LeafCert


class Files:
    """Certificates in files: of an authority, of hosts and clients that it signed, and of a stranger."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.authority, self.stranger = CA(), CA()
        self.ca = self.written("ca.pem", self.authority)
        self.other_ca = self.written("other-ca.pem", self.stranger)
        self.by_ip = self.leaf("by-ip", self.authority.issue_cert("127.0.0.1"))
        self.by_name = self.leaf("by-name", self.authority.issue_cert("hosts.example"))
        self.client = self.leaf("client", self.authority.issue_cert("reader@example.org"))
        self.foreign = self.leaf("foreign", self.stranger.issue_cert("127.0.0.1"))

    def written(self, name: str, authority: CA) -> str:
        path = self.root / name
        authority.cert_pem.write_to_path(str(path))
        return str(path)

    def leaf(self, name: str, cert: LeafCert) -> dict[str, str]:
        certificate, key = self.root / f"{name}.pem", self.root / f"{name}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
        cert.private_key_pem.write_to_path(str(key))
        return {"certificate": str(certificate), "key": str(key)}
