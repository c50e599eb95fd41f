"""Test the selection of a cluster's leftovers from all that is on the machine."""

import os
from pathlib import Path

import pytest

from stepcluster import cgroups, cleaning, lifecycle, network, state
from stepcluster.layout import Layout

FOLDER = Path("/state/a")


def leftovers(groups: list[str], mounts: list[Path], others: list[str]) -> cleaning.Leftovers:
    return cleaning.plan(cluster="a", others=others, groups=groups, mounts=mounts, folder=FOLDER)


def test_only_own_groups_are_taken() -> None:
    found = leftovers(
        [
            "stepkeeper-a-system",
            "stepkeeper-a-tpu-0",
            "stepkeeper-ab-system",
            "docker",
            "stepkeeper-b-system",
        ],
        [],
        [],
    )
    assert found.groups == ("stepkeeper-a-system", "stepkeeper-a-tpu-0")


def test_a_cluster_whose_name_goes_on_keeps_its_groups() -> None:
    found = leftovers(["stepkeeper-a-system", "stepkeeper-a-b-system"], [], ["a-b", "c"])
    assert found.groups == ("stepkeeper-a-system",)


def test_mounts_are_taken_from_the_inside_out_and_only_below_the_folder() -> None:
    found = leftovers([], [Path("/state/a/x"), Path("/state/ab"), Path("/state/a/x/y"), Path("/")], [])
    assert found.mounts == (Path("/state/a/x/y"), Path("/state/a/x"))


def test_mount_points_with_spaces_are_read() -> None:
    text = (
        "22 28 0:21 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n"
        "30 28 0:33 / /mnt/two\\040words rw shared:9 - tmpfs tmpfs rw\n"
    )
    assert cleaning.mount_points(text) == [Path("/sys"), Path("/mnt/two words")]


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


NOBODY = 1 << 22
"""No process has this number: the kernel gives only smaller ones away."""


@pytest.mark.parametrize(
    ("name", "is_abandoned"),
    [
        (f"test-{NOBODY}", True),
        (f"slice-{NOBODY}", True),
        (f"lane-1-{NOBODY}", True),
        (f"mine-{NOBODY}", False),
        ("test-mine", False),
        ("dev", False),
    ],
)
def test_a_cluster_is_abandoned_if_a_run_of_tests_that_is_gone_has_left_it(
    name: str, is_abandoned: bool
) -> None:
    assert lifecycle.is_abandoned(name) == is_abandoned


def test_a_cluster_of_a_run_that_goes_on_is_not_abandoned() -> None:
    assert not lifecycle.is_abandoned(f"lane-1-{os.getpid()}")
