"""A cluster takes nothing that is another's or the machine's, and leaves nothing."""

import os
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from stepcluster import cleaning, lifecycle
from stepcluster.errors import ClusterError
from stepcluster.layout import Layout, choose_block, parse_routes

ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
stepk128\t0000800A\t0200800A\t0003\t0\t0\t0\t0000FFFF\t0\t0\t0
"""
LAYOUT = Layout(name="a", block=128, folder=Path("/state/a"))


def test_only_own_groups_and_mounts_are_taken() -> None:
    own, others = (
        ["stepkeeper-a-system", "stepkeeper-a-tpu-0"],
        ["stepkeeper-ab-system", "stepkeeper-a-b-system"],
    )
    mounts = [Path("/state/a/x"), Path("/state/ab"), Path("/state/a/x/y"), Path("/")]
    assert cleaning.own_groups("a", [*own, *others, "docker"], others=["a-b", "c"]) == own
    assert cleaning.own_mounts(LAYOUT.folder, mounts) == [Path("/state/a/x/y"), Path("/state/a/x")]
    line = "30 28 0:33 / /mnt/two\\040words rw shared:9 - tmpfs tmpfs rw\n"
    assert cleaning.mount_points(line) == [Path("/mnt/two words")]


def test_a_cluster_is_abandoned_if_a_run_of_tests_that_is_gone_has_left_it() -> None:
    gone = 1 << 22  # the kernel gives only smaller numbers to processes
    assert all(lifecycle.is_abandoned(f"{kind}-{gone}") for kind in ("test", "slice", "lane-1"))
    for name in (f"mine-{gone}", "test-mine", "dev", f"lane-1-{os.getpid()}"):
        assert not lifecycle.is_abandoned(name)


def test_a_block_that_is_routed_is_passed_over_and_the_default_route_is_no_obstacle() -> None:
    assert choose_block([]) == 128
    assert choose_block(parse_routes(ROUTES)) == 129
    assert choose_block([IPv4Network("10.128.0.0/15"), IPv4Network("10.130.7.0/24")]) == 131
    with pytest.raises(ClusterError, match="take a cluster down"):
        choose_block([IPv4Network("10.0.0.0/8")])


def test_the_setting_that_the_first_cluster_found_is_what_the_last_one_leaves(tmp_path: Path) -> None:
    setting = tmp_path / "max_user_instances"
    setting.write_text("128\n")
    for _ in range(2):
        lifecycle.raise_limits(tmp_path, setting)
    assert int(setting.read_text()) == lifecycle.WANTED_INSTANCES
    lifecycle.restore_limits(tmp_path, setting)
    assert int(setting.read_text()) == 128
    assert list(tmp_path.iterdir()) == [setting]
    lifecycle.raise_limits(tmp_path, setting)
    setting.write_text("4096")
    lifecycle.restore_limits(tmp_path, setting)
    assert setting.read_text() == "4096", "somebody has changed it since"
