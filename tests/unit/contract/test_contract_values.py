"""The two sides of each process boundary read what the other wrote, and refuse anything else with its place."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from stepkeeper.contract import (
    ContractError,
    Identity,
    Report,
    Settings,
    Termination,
)
from stepkeeper_testing.pod import pod_environ, pod_identity

IDENTITY = pod_identity(
    jobset_number=1, restart_attempt=4, slice_index=1, host_index=3, n_slices=2, hosts_per_slice=4
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Settings: not JSON"),
        ("[]", "Settings: expected an object, got list"),
        ('{"interval": {"every": {"steps": 1}}}', "Settings: key 'uri' is missing"),
        ('{"uri": 3, "interval": {"every": {"steps": 1}}}', "Settings.uri: expected str, got int"),
        (
            '{"uri": "gs://b", "interval": {"every": {"steps": true}}}',
            "interval.every.steps: expected int, got bool",
        ),
        ('{"uri": "gs://b", "interval": {"auto": {}, "continuous": {}}}', "exactly one of every"),
    ],
)
def test_wrong_settings_are_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(ContractError, match=message.replace("[", "\\[")):
        Settings.from_json(text)


HEAD = {"sequence": 1, "step": 1, "uri": "gs://b/x", "size_bytes": 1}
COMMIT = HEAD | {"duration_millis": 1, "time_unix_s": 1}


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"step": -5}, r"Report\.step: expected a number from 0"),
        ({"step": 2**53 + 1}, r"Report\.step: expected a number from 0"),
        ({"root": "r" * 65}, r"Report\.root: expected at most 64 characters, got 65"),
        ({"head": HEAD | {"uri": "x" * 2049}}, r"Report\.head\.uri: expected at most 2048 characters"),
        ({"commits": [COMMIT | {"time_unix_s": 253_402_300_800}]}, r"Report\.commits\[0\]\.time_unix_s"),
        ({"notice": "\ud800"}, r"Report\.notice: a half of a surrogate pair"),
        ({"metrics": {"loss": "\ud800"}}, r"Report\.metrics\.loss: a half of a surrogate pair"),
        ({"metrics": {str(i): "1" for i in range(17)}}, "at most 16 metrics"),
    ],
)
def test_a_report_with_a_value_that_no_status_can_hold_is_refused(
    more: dict[str, object], place: str
) -> None:
    with pytest.raises(ContractError, match=place):
        Report.from_json(json.dumps({"phase": "Training"} | more))


@pytest.mark.parametrize(
    "text",
    [
        '{"code":75,"step":-1}',
        '{"code":-1}',
        '{"code":75,"committed":{"sequence":9007199254740993,"step":1}}',
        '{"code":75,"root":"%s"}' % ("r" * 65),
        "[" * 4000,
    ],
)
def test_a_termination_message_that_no_trainer_of_ours_wrote_is_not_believed(text: str) -> None:
    with pytest.raises(ContractError):
        Termination.from_json(text)


@pytest.mark.parametrize("cause", ["MeteorStrike", "x" * 3000])
def test_a_cause_that_is_not_known_is_some_disruption(cause: str) -> None:
    assert Termination.from_json(json.dumps({"code": 75, "cause": cause})).cause == "Disruption"
    assert Termination.from_json('{"code":75,"cause":"Maintenance"}').cause == "Maintenance"


def test_last_words_with_a_name_that_is_no_text_are_still_said() -> None:
    assert "no such file" in str(
        Termination.from_json(Termination(code=1, error="no such file \udce9").to_json()).error
    )


@pytest.mark.parametrize("error", ["x" * 100_000, "é" * 9000, '"\\\n' * 4000])
def test_a_termination_message_fits_what_the_kubelet_keeps_and_keeps_the_end(error: str) -> None:
    data = Termination(code=1, step=3, error=error + "ValueError: no").to_json()
    assert len(data) <= 4096
    assert Termination.from_json(data).error is not None
    assert str(Termination.from_json(data).error).endswith("ValueError: no")


def test_importing_the_contract_brings_no_torch() -> None:
    code = "import sys, stepkeeper, stepkeeper.contract; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_of_processes_side_by_side_the_one_that_tells_most_has_the_last_word() -> None:
    done, lost, failed, saved, fenced = (Termination(code=code, rank=0) for code in (0, 78, 1, 75, 77))
    order = [done, lost, failed, saved, fenced]
    for i, earlier in enumerate(order):
        for j, later in enumerate(order):
            told = replace(earlier, notice="sigterm")
            assert replace(later, rank=1).replaces(told) == (j >= i)
            assert later.replaces(earlier), "a process says last what counts"
            assert replace(later, rank=1, restart=1).replaces(earlier), "a launcher has started it later"


@pytest.mark.parametrize("code", [1, 78])
def test_a_process_that_is_stopped_because_another_ended_leaves_its_word(code: int) -> None:
    ended = Termination(code=code, rank=0, restart=0, error="the loss is no number")
    stopped = Termination(code=75, rank=1, restart=0, notice="sigterm")
    assert not stopped.replaces(ended)
    assert replace(stopped, restart=1).replaces(ended)
    assert stopped.replaces(replace(ended, notice="sigterm")), "both were told, and one failed for it"


def test_the_notice_that_the_pod_had_first_stays_when_its_launcher_stops_the_rest() -> None:
    stopped = Termination(code=75, rank=1, notice="sigterm")
    for notice in ("directive", "preempted", "peer"):
        assert not stopped.replaces(Termination(code=75, rank=0, notice=notice))
    assert stopped.replaces(Termination(code=75, rank=0, notice="sigterm"))


def test_an_identity_survives_the_environment() -> None:
    environ = pod_environ(IDENTITY)
    assert Identity.from_env(environ) == IDENTITY
    assert set(environ) == set(Identity.variables())
    assert (IDENTITY.rank, IDENTITY.n_hosts, IDENTITY.ordinal) == (7, 8, (1, 4))
    with pytest.raises(ContractError, match="STEPKEEPER_GRACE_S='soon' is no whole number"):
        Identity.from_env(environ | {"STEPKEEPER_GRACE_S": "soon"})
    del environ["STEPKEEPER_TERMINATION_FILE"]
    assert Identity.from_env(environ).termination_file == "/dev/termination-log", "Kubernetes' own"
    del environ["STEPKEEPER_POD_UID"]
    with pytest.raises(ContractError, match="STEPKEEPER_POD_UID is missing"):
        Identity.from_env(environ)


def test_the_greatest_values_are_read_and_longer_reports_are_refused_unread() -> None:
    commit = COMMIT | {"uri": "x" * 2048, "time_unix_s": 253_402_300_799, "size_bytes": 2**53}
    raw = {"phase": "Training", "root": "r" * 64, "commits": [commit]}
    assert Report.from_json(json.dumps(raw)).commits[0].size_bytes == 2**53
    with pytest.raises(ContractError, match="at most 65536 bytes"):
        Report.from_json(b"{" * 65537)
