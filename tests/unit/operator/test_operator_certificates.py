"""Test the endpoint's CA and certificate, and the Secret that holds them."""

import base64
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from fake_cluster.cluster import FakeCluster
from stepkeeper_operator.endpoint.certificates import make_tls, needs_renewal, renew_tls
from stepkeeper_operator.endpoint.tls import ServingCertificate, read_secret, secret_manifest
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
    "KeyError('ca.key')": {"ca.key": None},
    "is damaged (ValueError(": {"tls.crt": b"x"},
    "tls.key isn't the key of tls.crt": {"tls.key": OTHER.serving.key_pem},
    "ca.key isn't the key of ca.crt": {"ca.key": OTHER.ca.key_pem},
    "is damaged (InvalidSignature(": {"ca.crt": OTHER.ca.certificate_pem, "ca.key": OTHER.ca.key_pem},
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


@pytest.mark.parametrize(("days", "same_ca"), [(3500, True), (3570, False), (4000, False)])
def test_a_ca_is_replaced_before_a_certificate_can_outlive_it(days: int, *, same_ca: bool) -> None:
    tls = make_tls(NAMES, now=NOW)
    after = renew_tls(tls, NAMES, now=NOW + timedelta(days=days))
    assert (after.ca == tls.ca) is same_ca
    assert read_secret(secret_manifest(after, namespace="ns", name="tls")) == after


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
