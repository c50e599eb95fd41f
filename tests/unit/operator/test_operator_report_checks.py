"""Test what of a report is refused or left out, since the job that it is about can't have it."""

from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.kubelets import training_report
from fake_cluster.stories import table
from stepkeeper.contract import CommitPoint, Report, SlowestRank
from stepkeeper_operator.endpoint.report_checks import check_report
from stepkeeper_operator.errors import ReportRefusedError

NOW: Final = 1_800_000_000
ROOT: Final = "gs://bucket/runs/lm"
FAR: Final = 1_000_001


def job(*, uri: object = ROOT, total: object = 400) -> dict[str, Any]:
    return {"spec": {"checkpoint": {"uri": uri}, "totalSteps": total}}


def report(uri: str = f"{ROOT}/40/1-abc", **more: Any) -> Report:
    plain = training_report(7, 40, claim=1, in_flight_step=50)
    (commit,), head = plain.commits, plain.head
    assert head is not None
    named: dict[str, Any] = {"commits": (replace(commit, uri=uri),), "head": replace(head, uri=uri)}
    return replace(plain, **(named | more))


@table(
    "root, uri, inside",
    {
        "a folder of the root": (ROOT, f"{ROOT}/40/1-abc", True),
        "a path in other words": (ROOT, "gs://bucket/runs//lm/./40", True),
        "the root itself": (ROOT, ROOT, True),
        "a folder on a disk": ("file:///data/lm", "file:///data/lm/40/1-abc", True),
        "a name with a blank": ("file:///data/my run", "file:///data/my%20run/40/1-abc", True),
        "its host": ("file:///data/lm", "file://localhost/data/lm/40", True),
        "another root": (ROOT, "gs://bucket/runs/lm2/40", False),
        "another bucket": (ROOT, "gs://other/runs/lm/40", False),
        "another scheme": (ROOT, "s3://bucket/runs/lm/40", False),
        "a way out": (ROOT, f"{ROOT}/../other/40", False),
        "the folder around it": (ROOT, "gs://bucket/runs", False),
        "a script": (ROOT, "javascript:alert(1)", False),
        "no uri": (ROOT, "", False),
        "a broken one": (ROOT, "gs://[bucket/runs/lm/40", False),
        "a control character": (ROOT, f"{ROOT}/40\x1b[2J", False),
        "a root that can't be read": (7, f"{ROOT}/40", True),
    },
)
def test_commits_outside_the_root_are_left_out_with_all_that_is_said_of_their_log(
    root: object, uri: str, *, inside: bool
) -> None:
    given = report(uri)
    expected = given if inside else replace(given, root=None, claim=None, tail=0, head=None, commits=())
    assert check_report(given, job(uri=root), now=NOW) == expected
    renamed = check_report(replace(given, root="r\n"), job(uri=root), now=NOW)
    assert renamed == replace(given, root=None, claim=None, tail=0, head=None, commits=())
    (commit,) = given.commits
    alone = replace(given, head=None, commits=(commit,))
    assert (check_report(alone, job(uri=root), now=NOW).root is None) is not inside


@pytest.mark.parametrize(
    "far",
    [
        report(step=FAR),
        report(in_flight_step=FAR),
        report(restored=CommitPoint(sequence=1, step=FAR)),
        report(ranks=SlowestRank(slowest=1, step=FAR)),
        report(commits=(replace(report().commits[0], step=FAR),)),
        replace(training_report(7, FAR), step=1, commits=()),
    ],
)
def test_a_step_far_beyond_the_last_one_is_refused(far: Report) -> None:
    with pytest.raises(
        ReportRefusedError, match=f"step {FAR} is far beyond spec.totalSteps \\(400\\)"
    ) as caught:
        check_report(far, job(), now=NOW)
    assert caught.value.status == 400
    for total in (None, "400", 2000):
        assert check_report(far, job(total=total), now=NOW) == far


def test_a_training_that_goes_on_after_its_last_step_is_believed() -> None:
    for step in (401, 4000, 1_000_000):
        assert check_report(report(step=step), job(), now=NOW).step == step


def test_only_characters_that_can_be_seen_are_kept_of_names_and_values() -> None:
    metrics = {"los\ns": "\x1b[31m1.5", "lr\u202e": "1e-3 (é)"}
    checked = check_report(report(notice="sig\tterm", metrics=metrics, stacks="a\nb"), job(), now=NOW)
    assert (checked.notice, checked.metrics) == ("sigterm", {"loss": "[31m1.5", "lr": "1e-3 (é)"})
    assert checked.stacks == "a\nb"


def test_a_commit_has_no_later_time_than_its_report() -> None:
    (commit,) = report().commits
    commits = tuple(replace(commit, time_unix_s=at) for at in (NOW - 9, NOW + 9, 253_402_300_799))
    checked = check_report(report(commits=commits), job(), now=NOW + 0.5)
    assert [each.time_unix_s for each in checked.commits] == [NOW - 9, NOW, NOW]
