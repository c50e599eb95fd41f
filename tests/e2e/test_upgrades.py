"""Upgrade the operator, roll it back and upgrade it again, while jobs run, are suspended, and have to restart.

No test patches an object by hand. Each job has two hosts, or is suspended; the restarting one needs the operator for
each start, because its JobSet is deleted.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from typing_extensions import override

from stepcluster.api import Cluster
from stepcluster.product import NAMESPACE, apply_crds, install_operator
from stepcluster.releases import ROOT, TREE, Version, make_next, release
from stepcluster.shelljobs import HOLD, ShellJob, apply_all, condition, container, delete_all, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

RELEASES: Final = sorted(path.name for path in (ROOT / "tests/data/releases").iterdir())
SAVES: Final = f"trap 'exit 75' TERM; {HOLD}"
HOURLY: Final = {"uri": "file:///nowhere", "interval": {"hourly": {}}}
ACCEPTED: Final = ("True", "SpecAccepted")
RUNS: Final = ("True", "")
"""Accepted for any reason: the CRDs may have defaults that a release doesn't know."""

UNKNOWN: Final = ("True", "UnknownFields")
UNREADABLE: Final = ("False", "UnreadableSpec")


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionedJob(ShellJob):
    """A ShellJob with more fields of its spec."""

    spec: Mapping[str, Any] = field(default_factory=dict)

    @override
    def manifest(self) -> dict[str, Any]:
        manifest = ShellJob.manifest(self)
        return manifest | {"spec": manifest["spec"] | self.spec}

    def uids(self) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.pods()}

    def suspend(self, *, suspend: bool) -> None:
        """Set spec.suspend, as users do."""
        self.kubectl(
            "patch", "ctj", self.name, "--type=merge", "-p", json.dumps({"spec": {"suspend": suspend}})
        )

    def until_accepted(self, found: tuple[str, str], *named: str) -> dict[str, Any]:
        """Wait for this status and reason, or any, of condition Accepted, and return the status."""

        def is_so(status: dict[str, Any]) -> bool:
            accepted = condition(status, "Accepted")
            return accepted.get("status") == found[0] and found[1] in {"", accepted.get("reason")}

        status = self.until(is_so)
        assert [each for each in named if each not in condition(status, "Accepted")["message"]] == []
        return status


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A job that runs, one that is suspended, and one that restarts."""

    runs: VersionedJob
    rests: VersionedJob
    restarts: VersionedJob
    pods: set[str] = field(default_factory=set)
    """Uids of the running job's pods at first."""

    @classmethod
    def of(cls, cluster: Cluster, prefix: str, **spec: Any) -> "Fleet":
        def job(name: str, **more: Any) -> VersionedJob:
            containers = [container("trainer", SAVES)]
            return VersionedJob(
                cluster=cluster, name=f"{prefix}-{name}", containers=containers, spec=spec | more, n_hosts=2
            )

        return cls(runs=job("runs"), rests=job("rests", suspend=True), restarts=job("restarts"))

    @property
    def jobs(self) -> Sequence[VersionedJob]:
        return (self.runs, self.rests, self.restarts)

    def begin(self) -> None:
        apply_all(self.runs.cluster, self.jobs)
        self.runs.until_phase("Running")
        self.rests.until_phase("Suspended")
        self.restarts.until_phase("Running", attempt=1)
        self.pods.update(self.runs.uids())
        assert len(self.pods) == 2

    def check(self, accepted: tuple[str, str], *named: str) -> None:
        """Check what this version does with each job: it leaves the first alone, and restarts the last."""
        for job in self.jobs:
            job.until_accepted(accepted, *named)
        before = self.restarts.until_phase("Running")
        number = before["attempts"][-1]["number"]
        self.restarts.kubectl("delete", "jobset", self.restarts.name, "--timeout=100s")
        after = self.restarts.until_phase("Running", attempt=number + 1)
        assert after["restarts"]["total"] == before["restarts"]["total"] + 1
        assert len([pod for pod in self.restarts.pods() if pod["status"]["phase"] == "Running"]) == 2
        self.rests.suspend(suspend=False)
        started = self.rests.until_phase("Running")["attempts"][-1]["number"]
        self.rests.suspend(suspend=True)
        assert self.rests.until_phase("Suspended")["attempts"][-1]["number"] == started
        status = self.runs.until_phase("Running")
        assert (self.runs.uids(), len(status["attempts"])) == (self.pods, 1)

    def finish(self) -> None:
        """All of them can still end well."""
        self.rests.suspend(suspend=False)
        self.rests.until_phase("Running")
        for job in self.jobs:
            job.finish()


def roll_back(cluster: Cluster, image_tag: str) -> None:
    """Go back to the Helm revision before this one, as docs/operations/upgrades.md has it. The CRDs stay."""
    cluster.helm(
        "rollback", "stepkeeper", "--namespace", NAMESPACE, "--wait", "--timeout=240s", timeout_s=270
    )
    runs = (
        "-n",
        NAMESPACE,
        "get",
        "deployment",
        "-o",
        "jsonpath={.items[*].spec.template.spec.containers[*].image}",
    )
    until(lambda: cluster.kubectl(*runs).endswith(f":{image_tag}"))


@pytest.fixture
def upgraded(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster that has this tree's operator and CRDs again when a test is over."""
    cluster.load_shell_image()
    yield cluster
    install_operator(cluster, reportIntervalSeconds=2)


@pytest.fixture(scope="module")
def next_version(tmp_path_factory: pytest.TempPathFactory) -> Version:
    """The made-up release after this tree."""
    return make_next(tmp_path_factory.mktemp("next"))


@pytest.fixture
def fleets(cluster: Cluster) -> Iterator[list[Fleet]]:
    """The jobs of a test, which are deleted at its end."""
    made: list[Fleet] = []
    yield made
    delete_all(cluster, [job for fleet in made for job in fleet.jobs])


@pytest.mark.parametrize("name", RELEASES)
def test_from_a_release_to_this_tree_and_back_and_again(
    upgraded: Cluster, fleets: list[Fleet], tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    old = release(name, tmp_path_factory.mktemp("release"))
    install_operator(upgraded, version=old, reportIntervalSeconds=2)
    fleet = Fleet.of(upgraded, "old")
    fleets.append(fleet)
    fleet.begin()
    fleet.check(ACCEPTED)
    install_operator(upgraded, reportIntervalSeconds=2)
    fleet.check(ACCEPTED)
    roll_back(upgraded, name)
    fleet.check(RUNS)
    install_operator(upgraded, reportIntervalSeconds=2)
    fleet.check(ACCEPTED)
    fleet.finish()


def test_from_this_tree_to_the_next_release_and_back_and_again(
    upgraded: Cluster, fleets: list[Fleet], next_version: Version
) -> None:
    install_operator(upgraded, reportIntervalSeconds=2)
    plain = Fleet.of(upgraded, "plain")
    fleets.append(plain)
    plain.begin()
    apply_crds(upgraded, next_version)  # the first step of an upgrade, with the operator of before
    until(lambda: "nextLimit" in plain.runs.get("ctj", plain.runs.name)["spec"]["restarts"])
    plain.check(UNKNOWN, "spec.placement.hosts.nextSpread", "spec.restarts.nextLimit")
    install_operator(upgraded, version=next_version, reportIntervalSeconds=2)
    hourly = Fleet.of(upgraded, "hourly", checkpoint=HOURLY)
    fleets.append(hourly)
    hourly.begin()
    for fleet in fleets:
        fleet.check(ACCEPTED)
        assert newer_parts(fleet) == [5, 5] * 3
    roll_back(upgraded, TREE.name)
    plain.check(UNKNOWN, "spec.placement.hosts.nextSpread", "spec.restarts.nextLimit")
    hourly.check(
        UNREADABLE, "doesn't know hourly", "the job restarts with the settings that were accepted last"
    )
    assert [newer_parts(fleet) for fleet in fleets] == [[5, 5] * 3] * 2
    install_operator(upgraded, version=next_version, reportIntervalSeconds=2)
    for fleet in fleets:
        fleet.check(ACCEPTED)
        assert newer_parts(fleet) == [5, 5] * 3
        fleet.finish()


def test_jobs_run_on_where_older_crds_have_dropped_a_choice_until_they_are_applied_again(
    upgraded: Cluster, fleets: list[Fleet], next_version: Version
) -> None:
    """Nobody should apply older CRDs, since the API server forgets what they don't have. Pods don't care."""
    install_operator(upgraded, version=next_version, reportIntervalSeconds=2)
    fleet = Fleet.of(upgraded, "dropped", checkpoint=HOURLY)
    fleets.append(fleet)
    fleet.begin()
    install_operator(upgraded, reportIntervalSeconds=2)
    fleet.check(UNREADABLE, "none of every, continuous, auto is given")
    install_operator(upgraded, version=next_version, reportIntervalSeconds=2)
    fleet.check(UNREADABLE)
    for job in (fleet.runs, fleet.restarts):
        job.kubectl("apply", "-f", "-", stdin=json.dumps(job.manifest()))
        job.until_accepted(ACCEPTED)
    assert fleet.runs.uids() == fleet.pods


def newer_parts(fleet: Fleet) -> list[object]:
    """Return, for each job, the fields that the next release writes into its status."""
    found = [job.status() for job in fleet.jobs]
    return [part for status in found for part in (status["nextScore"], status["resources"]["nextRacks"])]
