"""Addresses and names: nothing of two clusters, or of a cluster and the machine, can meet."""

from ipaddress import IPv4Network
from itertools import combinations
from pathlib import Path

import pytest

from stepcluster.errors import ClusterError
from stepcluster.layout import N_BLOCKS, Layout, check_name, choose_block, parse_routes

ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
stepk128\t0000800A\t0200800A\t0003\t0\t0\t0\t0000FFFF\t0\t0\t0
"""


def layout(block: int = 128, name: str = "dev") -> Layout:
    return Layout(name=name, block=block, folder=Path("/state/dev"))


def test_routes_are_read() -> None:
    assert parse_routes(ROUTES) == (
        IPv4Network("0.0.0.0/0"),
        IPv4Network("192.0.2.0/24"),
        IPv4Network("10.128.0.0/16"),
    )


def test_a_block_that_is_routed_is_passed_over_and_the_default_route_is_no_obstacle() -> None:
    assert choose_block([]) == 128
    assert choose_block(parse_routes(ROUTES)) == 129
    assert choose_block([IPv4Network("10.128.0.0/15"), IPv4Network("10.130.7.0/24")]) == 131


def test_a_full_machine_says_so() -> None:
    with pytest.raises(ClusterError, match="take a cluster down"):
        choose_block([IPv4Network("10.0.0.0/8")])


def test_networks_of_one_cluster_do_not_overlap() -> None:
    one = layout()
    cable = IPv4Network(f"{one.host_address}/24", strict=False)
    networks = [cable, one.service_network, *(one.pod_network(number) for number in range(127))]
    assert all(network.subnet_of(one.network) for network in networks)
    assert not [pair for pair in combinations(networks, 2) if pair[0].overlaps(pair[1])]
    assert one.address in cable
    assert one.dns_service_address in one.service_network


def test_a_node_too_many_is_refused() -> None:
    with pytest.raises(ClusterError, match="at most 127"):
        layout().pod_network(127)


def test_interface_names_fit_the_kernel() -> None:
    names = {layout(block).host_interface for block in range(128, 128 + N_BLOCKS)}
    assert len(names) == N_BLOCKS
    assert max(len(name) for name in names) <= 15


@pytest.mark.parametrize("name", ["", "Dev", "1dev", "a/b", "..", "a" * 21, "dev_1"])
def test_a_name_that_is_no_folder_name_is_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="can't be a cluster's name"):
        check_name(name)


def test_a_plain_name_is_taken() -> None:
    assert check_name("test-12345") == "test-12345"
