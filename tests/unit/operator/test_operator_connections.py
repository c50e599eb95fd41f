"""Test which connection a full server closes to make room for one more."""

import pytest

from stepkeeper_operator.endpoint.connections import Peer, find_displaced

FAIR_S = 0.5
NOW_S = 100.0


@pytest.mark.parametrize(
    ("addresses", "ages_s", "asked", "newcomer", "displaced"),
    [
        ("aaa", (9, 8, 0), "---", "b", 0),
        ("aaa", (0, 0, 0), "---", "b", 0),
        ("baa", (9, 8, 7), "---", "b", 0),
        ("baaa", (9, 8, 7, 6), "----", "b", 1),
        ("baaa", (9, 8, 7, 6), "----", "a", 1),
        ("baaa", (9, 0.4, 0.3, 0.2), "----", "a", None),
        ("abc", (9, 8, 7), "---", "d", 0),
        ("abc", (0.4, 0.3, 0.2), "---", "d", None),
        ("abc", (9, 8, 7), "---", "c", 2),
        ("aab", (9, 8, 7), "xxx", "c", 0),
        ("abc", (9, 8, 7), "x--", "d", 1),
        ("abc", (9, 8, 7), "xxx", "d", None),
        ("abbb", (9, 8, 7, 6), "-xx-", "b", 3),
        ("", (), "", "a", None),
    ],
    ids=[
        "a crowd loses its oldest to another address",
        "however new it is",
        "of two crowds the one with the oldest",
        "one of few is no crowd",
        "one more of a crowd displaces its oldest",
        "but none that has just come",
        "among equals the oldest gives way",
        "but none that has just come from anywhere",
        "a second one displaces the first of its own address",
        "a crowd loses one that has asked",
        "among equals one that has asked stays",
        "though all have",
        "the first of its own address that has not asked",
        "nobody is there",
    ],
)
def test_the_oldest_of_the_address_with_most_connections_gives_way(
    addresses: str, ages_s: tuple[float, ...], asked: str, newcomer: str, displaced: int | None
) -> None:
    peers = [
        Peer(address, NOW_S - age_s, has_asked=has == "x")
        for address, age_s, has in zip(addresses, ages_s, asked, strict=True)
    ]
    found = find_displaced(peers, Peer(newcomer, NOW_S), FAIR_S)
    assert found is (None if displaced is None else peers[displaced])
