"""Credentials of a federation: a certificate authority, a server certificate, and keys of nodes.

They are made for one federation, and certificates expire after ``DAYS`` days. In production, use
certificates of your own authority instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 30
_CLOCKS_DIFFER = timedelta(minutes=5)


def make_certificates(folder: Path, names: Sequence[str]) -> None:
    """Write a certificate authority (``ca.crt``), and a certificate and a key of the server.

    The files of the server are ``server.pem`` and ``server.key``. The authority's private key is
    not stored, so no second server certificate can be signed with it.

    Parameters
    ----------
    folder
        Folder to write to; it must exist.
    names
        IP addresses and host names under which clients reach the server.

    Raises
    ------
    FileExistsError
        If the folder already has a ``server.key``.
    """
    authority_key, server_key = (
        ec.generate_private_key(ec.SECP384R1()),
        ec.generate_private_key(ec.SECP384R1()),
    )
    authority = _certificate(
        ("fedclade example CA", authority_key),
        ("fedclade example CA", authority_key),
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_usage("key_cert_sign", "crl_sign"), True),
    )
    server = _certificate(
        (names[0], server_key),
        ("fedclade example CA", authority_key),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage("digital_signature"), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName([_general_name(name) for name in names]), False),
    )
    write_private(
        folder / "server.key",
        server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
    (folder / "ca.crt").write_bytes(authority.public_bytes(Encoding.PEM))
    (folder / "server.pem").write_bytes(server.public_bytes(Encoding.PEM))


def make_node_key(path: Path) -> Path:
    """Write a node's private key, and its public key with the suffix ``.pub``.

    The result is the same as of ``ssh-keygen -t ecdsa -b 384``: a pair of elliptic-curve keys on
    the curve P-384, in OpenSSH's format.

    Returns
    -------
    Path
        Path of the public key.

    Raises
    ------
    FileExistsError
        If the private key already exists.
    """
    key, public = ec.generate_private_key(ec.SECP384R1()), path.with_suffix(".pub")
    write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    )
    return public


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read.

    The permissions are set when the file is created, before anything is written to it.

    Raises
    ------
    FileExistsError
        If the file already exists.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _certificate(
    subject: tuple[str, ec.EllipticCurvePrivateKey],
    issuer: tuple[str, ec.EllipticCurvePrivateKey],
    *extensions: tuple[x509.ExtensionType, bool],
) -> x509.Certificate:
    """Sign a subject's public key with the issuer's key.

    Subject and issuer are each ``(name, key)``; an extension is ``(extension, critical)``.
    """
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject[0])]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer[0])]))
        .public_key(subject[1].public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(subject[1].public_key()), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer[1].public_key()),
            critical=False,
        )
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(issuer[1], hashes.SHA384())


def _usage(*allowed: str) -> x509.KeyUsage:
    known = (
        *(
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
        ),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{usage: usage in allowed for usage in known})


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
