"""The two sides of each process boundary read each other, also another version, and refuse the rest with its place."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from stepkeeper.contract import (
    AutoInterval,
    CommitPoint,
    ContractError,
    Directive,
    Identity,
    Interval,
    OnDisruption,
    Report,
    ReportPhase,
    Settings,
    Termination,
)
from stepkeeper.contract.wire import MESSAGE_FORMAT, decode, encode
from stepkeeper.version import __version__
from stepkeeper_testing.pod import pod_environ, pod_identity

IDENTITY = pod_identity(
    jobset_number=1, restart_attempt=4, slice_index=1, host_index=3, n_slices=2, hosts_per_slice=4
)


EVERY = '"interval": {"every": {"steps": 1}}'
HEAD = {"sequence": 1, "step": 1, "uri": "gs://b/x", "size_bytes": 1}
COMMIT = HEAD | {"duration_millis": 1, "time_unix_s": 1}


def report(**more: object) -> str:
    return json.dumps({"phase": "Training"} | more)


@pytest.mark.parametrize(
    ("kind", "text", "place"),
    [
        (Settings, "{", "Settings: not JSON"),
        (Settings, "[]", r"Settings: expected an object, got list"),
        (Settings, f"{{{EVERY}}}", "Settings: key 'uri' is missing"),
        (Settings, f'{{"uri": 3, {EVERY}}}', r"Settings\.uri: expected str, got int"),
        (
            Settings,
            f'{{"uri": "gs://b", {EVERY.replace("1", "true")}}}',
            "every.steps: expected int, got bool",
        ),
        (Settings, '{"uri": "gs://b", "interval": {"auto": {}, "continuous": {}}}', "exactly one of every"),
        (Report, report(step=-5), r"Report\.step: expected a number from 0"),
        (Report, report(step=2**53 + 1), r"Report\.step: expected a number from 0"),
        (Report, report(root="r" * 65), r"Report\.root: expected at most 64 characters, got 65"),
        (Report, report(head=HEAD | {"uri": "x" * 2049}), r"Report\.head\.uri: expected at most 2048"),
        (Report, report(commits=[COMMIT | {"time_unix_s": 253_402_300_800}]), r"commits\[0\]\.time_unix_s"),
        (Report, report(notice="\ud800"), r"Report\.notice: half a surrogate pair"),
        (Report, report(metrics={"loss": "\ud800"}), r"Report\.metrics\.loss: half a surrogate pair"),
        (Report, report(metrics={str(i): "1" for i in range(17)}), "at most 16 metrics"),
        (Termination, '{"code":75,"step":-1}', "step"),
        (Termination, '{"code":-1}', "code"),
        (Termination, '{"code":75,"committed":{"sequence":9007199254740993,"step":1}}', "sequence"),
        (Termination, '{"code":75,"root":"%s"}' % ("r" * 65), "root"),
        (Termination, "[" * 4000, "Termination"),
    ],
)
def test_a_message_that_is_wrong_is_refused_with_the_place(
    kind: type[Settings | Report | Termination], text: str, place: str
) -> None:
    with pytest.raises(ContractError, match=place):
        kind.from_json(text)


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
    with pytest.raises(ContractError, match="STEPKEEPER_GRACE_S='soon' is not a whole number"):
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


Message: TypeAlias = Settings | Report | Directive | Termination

RECORDS: Final = Path(__file__).parents[2] / "data/wire"
URI: Final = "gs://bucket/runs/lm"
RENAMED: Final = "Unheard"
"""A member that no enum has."""


KINDS: Final[Mapping[str, type[Message]]] = {
    "settings": Settings,
    "report": Report,
    "directive": Directive,
    "termination": Termination,
}


def recorded(version: str, name: str) -> bytes:
    return (RECORDS / version / f"{name}.json").read_bytes().strip()


NAMES: Final = tuple(KINDS)
VERSIONS: Final = tuple(sorted(folder.name for folder in RECORDS.iterdir()))


def written(name: str) -> Message:
    return KINDS[name].from_json(recorded(__version__, name))


@pytest.mark.parametrize("name", NAMES)
def test_the_record_of_this_version_is_what_its_writers_write(name: str) -> None:
    message = written(name)
    assert recorded(__version__, name) == message.to_json()
    # A key with its default is left out of what is written, so no record would show it.
    assert {field.name for field in dataclasses.fields(message)} == set(json.loads(message.to_json()))


def _contains(whole: Any, part: Any) -> bool:
    if isinstance(part, dict):
        return all(_contains(whole[key], item) for key, item in part.items())
    if isinstance(part, list):
        return all(_contains(*pair) for pair in zip(whole, part, strict=True))
    return bool(whole == part)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_what_a_released_version_wrote_is_read(version: str, name: str) -> None:
    message = KINDS[name].from_json(recorded(version, name))
    assert _contains(encode(message), json.loads(recorded(version, name)))


def _objects(raw: Any) -> Iterator[dict[str, Any]]:
    if isinstance(raw, dict):
        yield raw
        for key, value in raw.items():
            # Metrics are the user's names, which aren't ours to know.
            yield from () if key == "metrics" else _objects(value)
    elif isinstance(raw, list):
        for item in raw:
            yield from _objects(item)


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_the_next_version_are_passed_over_at_every_depth(name: str) -> None:
    raw = json.loads(recorded(__version__, name))
    for found in list(_objects(raw)):
        found |= {"liveness": {"step_s": 5, "phases": ["Compile"]}, "pace": None, "zone": "a", "n": 2.5}
    assert KINDS[name].from_json(json.dumps(raw)) == written(name)


def test_a_start_can_tell_what_of_its_settings_it_does_not_know() -> None:
    raw = json.loads(recorded(__version__, "settings"))
    raw["interval"] = {"pace": {"steps": 3}}
    raw["liveness"] = {}
    assert Settings.list_unknown(json.dumps(raw)) == (
        "Settings.liveness",
        "Settings.interval.pace",
        "interval: give exactly one of every, continuous and auto",
    )
    assert Settings.list_unknown(recorded(__version__, "settings")) == ()


def _settings(**changed: object) -> Settings:
    return Settings.from_json(json.dumps({"uri": URI, "interval": {"every": {"steps": 5}}} | changed))


def test_unknown_members_are_read_as_what_loses_nothing() -> None:
    auto = Interval(auto=AutoInterval())
    assert _settings(interval={"pace": {"steps": 5}}).interval == auto
    assert _settings(interval={"every": {"tokens": 5}}).interval == auto
    assert _settings(on_disruption=RENAMED).on_disruption is OnDisruption.SAVE
    best = {"metric": "loss", "mode": RENAMED}
    assert _settings(retention={"last": 2, "best": best}).retention.every_steps == 1, "all commits are kept"
    assert Report.from_json(f'{{"phase":"{RENAMED}"}}').phase is ReportPhase.TRAINING
    assert Termination.from_json(f'{{"code":75,"cause":"{RENAMED}"}}').cause == "Disruption"


@pytest.mark.parametrize("name", NAMES)
def test_only_a_newer_format_is_refused_and_both_are_named(name: str) -> None:
    raw, kind = json.loads(recorded(__version__, name)), KINDS[name]
    assert kind.from_json(json.dumps(raw | {"format": MESSAGE_FORMAT})) == written(name)
    with pytest.raises(ContractError, match=f"{kind.__name__}: format 2 is newer than 1, the newest"):
        kind.from_json(json.dumps(raw | {"format": MESSAGE_FORMAT + 1}))
    with pytest.raises(ContractError, match=r"format: expected int"):
        kind.from_json(json.dumps(raw | {"format": "2"}))


def test_what_storage_holds_is_read_strictly() -> None:
    with pytest.raises(ContractError, match=r"CommitPoint: unknown key 'zone'; known: sequence, step"):
        decode(CommitPoint, {"sequence": 1, "step": 1, "zone": "a"})
    with pytest.raises(ContractError, match=r"'Unheard' is none of Save, Skip"):
        decode(Settings, {"uri": URI, "interval": {"every": {"steps": 1}}, "on_disruption": RENAMED})


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        (Settings, {"uri": URI, "interval": {"every": {"steps": 1}}}),
        (Report, {"phase": "Training"}),
        (Directive, {}),
        (Termination, {"code": 1}),
    ],
)
def test_no_other_key_is_needed_by_a_reader(kind: type[Message], least: dict[str, Any]) -> None:
    """An older writer doesn't know a key that is added later, so none may be required."""
    assert _contains(encode(kind.from_json(json.dumps(least))), least)
