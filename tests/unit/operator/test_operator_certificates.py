"""Test the endpoint's CA and certificate, and the Secret that holds them."""

import base64
import ssl
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from fake_cluster.cluster import FakeCluster
from stepkeeper_operator.endpoint.certificates import TlsMaterial, make_tls, needs_renewal, renew_tls
from stepkeeper_operator.endpoint.serving import load_certificate, server_tls
from stepkeeper_operator.endpoint.tls import ServingCertificate
from stepkeeper_operator.endpoint.tls_secret import read_secret, secret_manifest
from stepkeeper_operator.errors import CertificateError

NAMES = ("stepkeeper-operator.stepkeeper-system.svc", "10.0.0.1")
NOW = datetime(2027, 1, 1, tzinfo=UTC)
OTHER = make_tls(NAMES, now=NOW)


def test_the_serving_certificate_is_signed_by_the_ca_for_all_names() -> None:
    tls = make_tls(NAMES, now=NOW)
    ca = x509.load_pem_x509_certificate(tls.ca.certificate_pem)
    serving = x509.load_pem_x509_certificate(tls.serving.certificate_pem)
    serving.verify_directly_issued_by(ca)
    names = serving.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [NAMES[0]]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == [NAMES[1]]
    usage = serving.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    for certificate, is_ca in ((ca, True), (serving, False)):
        assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is is_ca


DAMAGES: dict[str, dict[str, bytes | None]] = {
    "lacks ca.key": {"ca.key": None},
    "tls.crt holds no certificate": {"tls.crt": b"x"},
    "ca.crt holds no certificate": {"ca.crt": b""},
    "tls.key holds no key": {"tls.key": b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"},
    "tls.key isn't the key of tls.crt": {"tls.key": OTHER.serving.key_pem},
    "ca.key isn't the key of ca.crt": {"ca.key": OTHER.ca.key_pem},
    "tls.crt isn't signed by ca.crt": {"ca.crt": OTHER.ca.certificate_pem, "ca.key": OTHER.ca.key_pem},
    "lacks next-ca.key": {"next-ca.crt": OTHER.ca.certificate_pem},
}


@pytest.mark.parametrize("why", DAMAGES)
async def test_a_damaged_secret_is_named_with_what_to_do_and_left_as_it_is(why: str) -> None:
    cluster = FakeCluster(lambda: 0.0)
    await keeper(cluster, "a.svc").renew()
    secret = cluster.objects["secrets", "ns", "tls"]
    data = dict(secret["data"])
    for key, value in DAMAGES[why].items():
        if value is None:
            del data[key]
        else:
            data[key] = base64.b64encode(value).decode()
    cluster.put("secrets", secret | {"data": data})
    cluster.writes.clear()
    with pytest.raises(CertificateError) as caught:
        await keeper(cluster, "a.svc").renew()
    assert why in str(caught.value)
    assert str(caught.value).startswith("Secret ns/tls")
    assert "Restore the Secret, or delete it" in str(caught.value)
    assert cluster.writes == []


def unlabelled(tls: TlsMaterial) -> dict[str, Any]:
    """Make a Secret as the first releases did, which set no label."""
    return {
        **secret_manifest(tls, namespace="ns", name="tls"),
        "metadata": {"name": "tls", "namespace": "ns"},
    }


def without_key_of_ca(secret: dict[str, Any]) -> dict[str, Any]:
    return secret | {"data": {key: value for key, value in secret["data"].items() if key != "ca.key"}}


THEIRS = {
    "a CA of another name": unlabelled(TlsMaterial(ca=OTHER.serving, serving=OTHER.serving)),
    "no key of the CA": without_key_of_ca(unlabelled(OTHER)),
    "no data": {"metadata": {"name": "tls", "namespace": "ns"}, "type": "Opaque"},
}


@pytest.mark.parametrize("secret", THEIRS.values(), ids=THEIRS)
async def test_a_secret_of_somebody_else_is_left_alone(secret: dict[str, Any]) -> None:
    cluster = FakeCluster(lambda: 0.0)
    cluster.put("secrets", secret)
    with pytest.raises(CertificateError, match="Secret ns/tls was not made by this operator"):
        await keeper(cluster, *NAMES).renew()
    assert cluster.writes == []


async def test_the_secret_of_a_release_that_set_no_label_is_taken_over() -> None:
    cluster = FakeCluster(lambda: 0.0)
    older = make_tls(("a.svc",))
    cluster.put("secrets", unlabelled(older))
    first, renewing = keeper(cluster, "a.svc"), keeper(cluster, "b.svc")
    await first.renew()
    assert first.ca_pem.encode() == older.ca.certificate_pem
    assert cluster.writes == []
    await renewing.renew()
    assert renewing.ca_pem == first.ca_pem
    labels = cluster.objects["secrets", "ns", "tls"]["metadata"]["labels"]
    assert labels == {"app.kubernetes.io/managed-by": "stepkeeper-operator"}


def shakes_hands(serving: TlsMaterial, trusted_pem: bytes) -> bool:
    """Play a TLS handshake in memory."""
    server_context, client_context = server_tls(), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    load_certificate(server_context, serving.serving)
    client_context.load_verify_locations(cadata=trusted_pem.decode())
    # The certificates of these stories are of other years.
    client_context.verify_flags |= 0x200000  # X509_V_FLAG_NO_CHECK_TIME
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=NAMES[0])
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return True


def test_a_ca_is_replaced_while_pods_trust_the_old_and_the_new_one() -> None:
    tls, now, seen = make_tls(NAMES, now=NOW), NOW, [make_tls(NAMES, now=NOW)]
    seen[0] = tls
    while now < NOW + timedelta(days=3650 + 60):
        now += timedelta(days=28)
        after = renew_tls(tls, NAMES, now=now)
        # A pod has the bundle of the last look, or this one's.
        assert shakes_hands(after, tls.trusted_pem)
        assert shakes_hands(after, after.trusted_pem)
        assert read_secret(secret_manifest(after, namespace="ns", name="tls")) == after
        if after.trusted_pem != tls.trusted_pem:
            seen.append(after)
        tls = after
    assert not shakes_hands(tls, OTHER.trusted_pem)
    first, both, signing, alone = seen
    assert (first.next_ca, both.ca) == (None, first.ca)
    assert both.trusted_pem == first.trusted_pem + both.next_ca.certificate_pem if both.next_ca else False
    assert (signing.ca, signing.old_cas) == (both.next_ca, (first.ca.certificate_pem,))
    assert (alone.ca, alone.old_cas) == (signing.ca, ())


def keeper(cluster: FakeCluster, *names: str) -> ServingCertificate:
    return ServingCertificate(cluster, namespace="ns", secret_name="tls", names=names)


@pytest.mark.parametrize(
    ("days", "more_names", "renew"),
    [(0, (), False), (59, (), False), (61, (), True), (200, (), True), (0, ("another.svc",), True)],
)
def test_a_certificate_is_renewed_a_month_before_its_end_or_if_it_lacks_a_name(
    days: int, more_names: tuple[str, ...], *, renew: bool
) -> None:
    now, names = NOW + timedelta(days=days), (*NAMES, *more_names)
    tls = make_tls(NAMES, now=NOW)
    assert needs_renewal(tls, names, now=now) is renew
    assert (renew_tls(tls, names, now=now) is tls) is not renew


@pytest.mark.parametrize(
    ("name", "writes"),
    [
        pytest.param("a.svc", ["create"], id="the next operator serves what the last one made"),
        pytest.param("b.svc", ["create", "replace"], id="one of another name is served from the same CA"),
    ],
)
async def test_the_ca_stays(name: str, writes: list[str]) -> None:
    cluster = FakeCluster(lambda: 0.0)
    first, second = keeper(cluster, "a.svc"), keeper(cluster, name)
    await first.renew()
    await second.renew()
    assert second.ca_pem == first.ca_pem
    assert [write.verb for write in cluster.writes] == writes
