"""Test the endpoint's CA and certificate, and the Secret that holds them."""

import base64
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from fake_cluster.cluster import FakeCluster
from stepkeeper_operator.endpoint.certificates import make_tls, needs_renewal, renew_tls
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


def test_the_ca_signs_and_the_serving_certificate_cannot() -> None:
    tls = make_tls(NAMES, now=NOW)
    for pair, is_ca in ((tls.ca, True), (tls.serving, False)):
        certificate = x509.load_pem_x509_certificate(pair.certificate_pem)
        assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is is_ca


@pytest.mark.parametrize(("days", "renew"), [(0, False), (59, False), (61, True), (200, True)])
def test_a_certificate_is_renewed_a_month_before_its_end(days: int, *, renew: bool) -> None:
    tls = make_tls(NAMES, now=NOW)
    assert needs_renewal(tls, NAMES, now=NOW + timedelta(days=days)) is renew


def test_a_certificate_that_lacks_a_name_is_renewed() -> None:
    assert needs_renewal(make_tls(NAMES, now=NOW), (*NAMES, "another.svc"), now=NOW)


def test_a_renewed_certificate_is_trusted_by_pods_that_know_the_old_ca() -> None:
    old = make_tls(NAMES, now=NOW)
    new = make_tls(NAMES, ca=old.ca, now=NOW + timedelta(days=80))
    assert new.ca == old.ca
    assert new.serving != old.serving
    ca = x509.load_pem_x509_certificate(old.ca.certificate_pem)
    x509.load_pem_x509_certificate(new.serving.certificate_pem).verify_directly_issued_by(ca)


def test_the_secret_gives_back_what_was_put_in() -> None:
    tls = make_tls(NAMES, now=NOW)
    assert read_secret(secret_manifest(tls, namespace="ns", name="tls")) == tls


DAMAGES: dict[str, dict[str, bytes | None]] = {
    "lacks ca.key": {"ca.key": None},
    "tls.crt holds no certificate": {"tls.crt": b"x"},
    "ca.crt holds no certificate": {"ca.crt": b""},
    "tls.key holds no key": {"tls.key": b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"},
    "tls.key isn't the key of tls.crt": {"tls.key": OTHER.serving.key_pem},
    "ca.key isn't the key of ca.crt": {"ca.key": OTHER.ca.key_pem},
    "tls.crt isn't signed by ca.crt": {"ca.crt": OTHER.ca.certificate_pem, "ca.key": OTHER.ca.key_pem},
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


async def test_a_secret_of_somebody_else_is_left_alone() -> None:
    cluster = FakeCluster(lambda: 0.0)
    cluster.put("secrets", {"metadata": {"name": "tls", "namespace": "ns"}, "type": "Opaque"})
    with pytest.raises(CertificateError, match="Secret ns/tls was not made by this operator"):
        await keeper(cluster, *NAMES).renew()
    assert cluster.writes == []


@pytest.mark.parametrize(("days", "same_ca"), [(3500, True), (3570, False), (4000, False)])
def test_a_ca_is_replaced_before_a_certificate_can_outlive_it(days: int, *, same_ca: bool) -> None:
    tls = make_tls(NAMES, now=NOW)
    after = renew_tls(tls, NAMES, now=NOW + timedelta(days=days))
    assert (after.ca == tls.ca) is same_ca
    assert read_secret(secret_manifest(after, namespace="ns", name="tls")) == after


def test_nothing_is_renewed_before_it_is_due() -> None:
    tls = make_tls(NAMES, now=NOW)
    assert renew_tls(tls, NAMES, now=NOW + timedelta(days=59)) is tls


def keeper(cluster: FakeCluster, *names: str) -> ServingCertificate:
    return ServingCertificate(cluster, namespace="ns", secret_name="tls", names=names)


async def test_the_next_operator_serves_what_the_last_one_made() -> None:
    cluster = FakeCluster(lambda: 0.0)
    first, second = keeper(cluster, "a.svc"), keeper(cluster, "a.svc")
    await first.renew()
    await second.renew()
    assert second.ca_pem == first.ca_pem
    assert [write.verb for write in cluster.writes] == ["create"]


async def test_an_operator_of_another_name_makes_a_certificate_from_the_same_ca() -> None:
    cluster = FakeCluster(lambda: 0.0)
    first, second = keeper(cluster, "a.svc"), keeper(cluster, "b.svc")
    await first.renew()
    await second.renew()
    assert second.ca_pem == first.ca_pem
    assert [write.verb for write in cluster.writes] == ["create", "replace"]
