"""Choosing what goes wrong."""

import json
import signal
import subprocess

import pytest

from stepcluster import containers, drill
from stepcluster.api import read_audit
from stepcluster.errors import FaultError

PROCESSES = {700: "python -m text_lm", 712: "python -m stepkeeper.companion", 690: "sh -c exec"}
NUMBERS = {700: 7, 712: 19, 690: 1}


def test_without_a_pattern_it_is_the_container_s_first_process() -> None:
    assert containers.choose(PROCESSES, NUMBERS, "") == 690


def test_what_has_ended_meanwhile_is_not_chosen() -> None:
    assert containers.choose(PROCESSES, NUMBERS | {712: 0}, "") == 690
    with pytest.raises(FaultError, match="0 processes match 'companion'"):
        containers.choose(PROCESSES, NUMBERS | {712: 0}, "companion")
    with pytest.raises(FaultError, match="one of: none"):
        containers.choose(PROCESSES, dict.fromkeys(NUMBERS, 0), "")


def test_a_pattern_names_one_process() -> None:
    assert containers.choose(PROCESSES, NUMBERS, "companion") == 712


@pytest.mark.parametrize("pattern", ["python", "java"])
def test_a_pattern_that_names_none_or_two_is_refused_with_what_there_is(pattern: str) -> None:
    with pytest.raises(
        FaultError, match=r"has to be one of: python -m text_lm; python -m stepkeeper\.companion"
    ):
        containers.choose(PROCESSES, NUMBERS, pattern)


def test_a_seed_gives_the_same_drill_every_time() -> None:
    first = drill.plan(7, ["tpu-0", "tpu-1"], n_faults=20, within_s=30)
    assert first == drill.plan(7, ["tpu-0", "tpu-1"], n_faults=20, within_s=30)
    assert first != drill.plan(8, ["tpu-0", "tpu-1"], n_faults=20, within_s=30)
    assert [fault.after_s for fault in first] == sorted(fault.after_s for fault in first)
    assert {fault.kind for fault in first} == {*drill.NODE_KINDS, *drill.CLUSTER_KINDS}
    assert all(bool(fault.node) == (fault.kind in drill.NODE_KINDS) for fault in first)


def test_pods_are_hit_only_where_it_was_said_which() -> None:
    kinds = {fault.kind for fault in drill.plan(7, ["tpu-0"], n_faults=60, with_pods=True)}
    assert kinds == {*drill.NODE_KINDS, *drill.CLUSTER_KINDS, *drill.POD_KINDS}


def test_a_line_of_the_audit_log_that_is_being_written_is_not_read_yet() -> None:
    def line(user: str, verb: str) -> str:
        return json.dumps({"user": {"username": user}, "verb": verb}) + "\n"

    text = line("a", "get") + line("b", "list") + line("a", "watch")
    assert [entry["verb"] for entry in read_audit(text)] == ["get", "list", "watch"]
    assert [entry["verb"] for entry in read_audit(text[:-20], "a")] == ["get"]
    assert [entry["verb"] for entry in read_audit(text[:-1])] == ["get", "list"]


def test_a_process_that_ends_before_its_signal_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that a machine's end has reached too: who tells it passes over that."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    monkeypatch.setattr(containers.Container, "processes", lambda _: {ended.pid: "python train.py"})
    monkeypatch.setattr(containers, "namespace_number", lambda _: 1)
    target = containers.Container(pod="p", node="n", container_id="c", groups=())
    with pytest.raises(FaultError, match=r"of pod p has ended meanwhile"):
        containers.send(target, signal.SIGTERM)
