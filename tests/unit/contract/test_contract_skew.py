"""Operators and pods of different versions read each other: unknown keys are passed over, unknown values are neutral.

tests/data/wire has a folder for each version, with one of each message as that version's writers make it, with all its
keys. A folder is added for a version that writes anything else, and none is ever removed.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from stepkeeper.contract import (
    AutoInterval,
    CommitPoint,
    ContractError,
    Directive,
    Interval,
    OnDisruption,
    Report,
    ReportPhase,
    Settings,
    Termination,
)
from stepkeeper.contract.wire import MESSAGE_FORMAT, decode, encode
from stepkeeper.version import __version__

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
    """Return whether `whole` contains all of `part`."""
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
