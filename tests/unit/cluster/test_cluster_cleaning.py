"""A cluster takes nothing that is another's or the machine's, and leaves nothing."""

import os
import time
from ipaddress import IPv4Network
from itertools import combinations
from pathlib import Path

import pytest

from stepcluster import cgroups, cleaning, lifecycle, network, state
from stepcluster.errors import ClusterError, CommandError
from stepcluster.layout import Layout, check_name, check_node_name, choose_block, parse_routes

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


def test_hierarchies_of_both_versions_are_found(tmp_path: Path) -> None:
    for name in ("memory", "cpu"):
        (tmp_path / name).mkdir()
    (tmp_path / "cpu,cpuacct").symlink_to("cpu")
    assert cgroups.hierarchies(tmp_path) == (tmp_path / "cpu", tmp_path / "memory")
    (tmp_path / "cgroup.controllers").touch()
    assert cgroups.hierarchies(tmp_path) == (tmp_path,)


@pytest.mark.parametrize(("is_running", "removed"), [(True, []), (False, ["stepk128"])])
def test_a_cable_that_is_another_clusters_by_now_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_running: bool, removed: list[str]
) -> None:
    """A cluster that crashed had this block, whose addresses were then free for another."""
    cut: list[str] = []
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(network, "disconnect", lambda layout: cut.append(layout.host_interface))
    monkeypatch.setattr(state, "is_running", lambda name: is_running and name == "another")
    for name in ("crashed", "another"):
        state.cluster_folder(name).mkdir(parents=True)
        state.write(state.Record(name=name, block=128, nodes=(), torch_folder=""))
    cleaning.remove_cable(Layout(name="crashed", block=128, folder=state.cluster_folder("crashed")))
    assert cut == removed


@pytest.mark.parametrize(
    ("said", "is_error"), [("Cannot find device", False), ("No such device", False), ("not permitted", True)]
)
def test_a_cable_that_the_kernel_removes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, is_error: bool
) -> None:
    cable = tmp_path / LAYOUT.host_interface
    cable.touch()

    def run(_: list[str]) -> str:
        cable.unlink()
        raise CommandError(said)

    monkeypatch.setattr(network, "INTERFACES", tmp_path)
    monkeypatch.setattr(network, "run", run)
    if is_error:
        with pytest.raises(CommandError, match="not permitted"):
            network.disconnect(LAYOUT)
    else:
        network.disconnect(LAYOUT)


def test_a_cluster_is_abandoned_if_a_run_of_tests_that_is_gone_has_left_it() -> None:
    gone = 1 << 22  # the kernel gives only smaller numbers to processes
    assert all(lifecycle.is_abandoned(f"{kind}-{gone}") for kind in ("test", "slice", "lane-1"))
    for name in (f"mine-{gone}", "test-mine", "dev", f"lane-1-{os.getpid()}"):
        assert not lifecycle.is_abandoned(name)


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


def test_a_folder_is_emptied_at_once_however_long_the_deletion_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, trash, programs = tmp_path / "a", tmp_path / "discarded", tmp_path / "bin"
    for file in (folder / "nodes" / "disk", trash / "discarded-earlier" / "disk", programs / "rm"):
        file.parent.mkdir(parents=True)
        file.write_text(f'#!/bin/sh\nuntil [ -e {tmp_path}/go ]; do sleep 0.05; done\nexec /bin/rm "$@"\n')
    (programs / "rm").chmod(0o755)
    kept = folder.stat().st_ino
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    cleaning.discard(folder, trash, patience_s=0.1)
    assert list(folder.iterdir()) == []
    assert folder.stat().st_ino == kept, "a process that waits for its lock has this folder"
    assert "still being deleted" in capsys.readouterr().err
    (tmp_path / "go").touch()
    deadline = time.monotonic() + 60
    while any(trash.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_block_that_is_routed_is_passed_over_and_the_default_route_is_no_obstacle() -> None:
    assert choose_block([]) == 128
    assert choose_block(parse_routes(ROUTES)) == 129
    assert choose_block([IPv4Network("10.128.0.0/15"), IPv4Network("10.130.7.0/24")]) == 131
    with pytest.raises(ClusterError, match="take a cluster down"):
        choose_block([IPv4Network("10.0.0.0/8")])


def test_networks_of_one_cluster_do_not_overlap() -> None:
    cable = IPv4Network(f"{LAYOUT.host_address}/24", strict=False)
    networks = [cable, LAYOUT.service_network, *(LAYOUT.pod_network(number) for number in range(127))]
    assert all(each.subnet_of(LAYOUT.network) for each in networks)
    assert not [pair for pair in combinations(networks, 2) if pair[0].overlaps(pair[1])]


def test_names_that_folders_nodes_or_sockets_cannot_have_are_refused() -> None:
    assert check_name("test-12345") == "test-12345"
    for name in ("", "Dev", "1dev", "a/b", "..", "a" * 21, "dev_1"):
        with pytest.raises(ClusterError, match="can't be a cluster's name"):
            check_name(name)
    long = Layout(name="l", block=128, folder=Path("/var/tmp/stepkeeper/clusters/a-cluster-with-20-ch"))
    assert check_node_name(long, "tpu-0")
    for name in ("", "1st", "with_underscore", "a-", "x" * 64, "t1v-n-0123abcd-w-0"):
        with pytest.raises(ClusterError, match=r"can't be a node's name|shorter one for the cluster"):
            check_node_name(long, name)
