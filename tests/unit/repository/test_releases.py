"""Releases stay what they were, and resources and values that they accept are accepted by this tree."""

import hashlib
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from stepkeeper.version import __version__

ROOT: Final = Path(__file__).parents[3]
RELEASES: Final = sorted((ROOT / "tests/data/releases").iterdir())
CRDS: Final = ("checkpointedtrainingjobs.stepkeeper.dev.yaml", "queuedresources.stepkeeper.dev.yaml")

TIGHTER: Final[Mapping[str, str]] = {
    "": "the rules that a QueuedResource keeps its place and machines were at spec, and refused more",
    ".spec.slices": "a topology of more chips than a pod: the cloud refuses it",
    ".spec.placement.tpu": "a topology of more chips than a pod: no cluster has nodes of it",
    ".podLabels": "the chart's own labels: such a Deployment was refused, or selected no pods",
}
"""What is narrower than in a release, by its path in the schema, and why no user's object is refused for it."""

KEPT: Final = (
    "type",
    "format",
    "pattern",
    "default",
    "anyOf",
    "$ref",
    "propertyNames",
    "x-kubernetes-list-type",
)

Schema = Mapping[str, Any]


def narrowed(old: Schema, new: Schema, path: str = "") -> Iterator[str]:
    """Yield each place where the new schema refuses, drops or fills in otherwise what the old one accepted."""
    yield from (f"{path}: {key} was {old.get(key)}" for key in KEPT if old.get(key) != new.get(key))
    if "enum" in new and not set(old.get("enum", ["anything"])) <= set(new["enum"]):
        yield f"{path}: enum was {old.get('enum')}"
    for what in ("Length", "Items", "Properties", "imum"):
        least, most = f"min{what}", f"max{what}"
        if new.get(least, -inf) > old.get(least, -inf):
            yield f"{path}: {least} was {old.get(least)}"
        if new.get(most, inf) < old.get(most, inf):
            yield f"{path}: {most} was {old.get(most)}"
    rules = [{each["rule"] for each in side.get("x-kubernetes-validations", ())} for side in (old, new)]
    yield from (f"{path}: has a new rule: {rule}" for rule in sorted(rules[1] - rules[0]))
    unknown = "x-kubernetes-preserve-unknown-fields"
    if old.get(unknown) and not new.get(unknown):
        yield f"{path}: drops unknown fields"
    yield from _fields(old, new, path)
    for key in ("items", "additionalProperties"):
        if isinstance(old.get(key), dict):
            yield from narrowed(old[key], new.get(key) or {}, f"{path}[]")


def _fields(old: Schema, new: Schema, path: str) -> Iterator[str]:
    for name in sorted(set(new.get("required", ())) - set(old.get("required", ()))):
        if "default" not in new["properties"][name]:
            yield f"{path}.{name}: is required"
    for group in ("properties", "definitions"):
        fields = new.get(group, {})
        for name, schema in old.get(group, {}).items():
            if name in fields:
                yield from narrowed(schema, fields[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}: is gone"


def in_chart(release: Path, name: str) -> bytes:
    with tarfile.open(release / f"stepkeeper-{release.name}.tgz") as chart:
        file = chart.extractfile(f"stepkeeper/{name}")
        assert file is not None
        return file.read()


def versions(crd: Schema) -> dict[str, Schema]:
    return {each["name"]: each["schema"]["openAPIV3Schema"] for each in crd["spec"]["versions"]}


def unexplained(found: Iterable[str]) -> list[str]:
    return [each for each in found if each.partition(":")[0] not in TIGHTER]


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_a_release_is_what_it_was(release: Path) -> None:
    lines = [line.split() for line in (release / "SHA256SUMS").read_text().splitlines()]
    sums = {name: digest for digest, name in lines}
    files = [file for file in release.iterdir() if file.name != "SHA256SUMS"]
    assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files} == sums


def test_this_tree_has_a_version_of_its_own() -> None:
    assert __version__ not in [release.name for release in RELEASES]


@pytest.mark.parametrize("name", CRDS)
@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_what_a_release_accepts_is_accepted(release: Path, name: str) -> None:
    old = versions(yaml.safe_load(in_chart(release, f"crds/{name}")))
    new = versions(yaml.safe_load((ROOT / "charts/stepkeeper/crds" / name).read_text(encoding="utf-8")))
    assert old.keys() <= new.keys()
    found = [each for version in old for each in narrowed(old[version], new[version])]
    assert unexplained(found) == []


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_values_of_a_releases_chart_fit_this_one(release: Path) -> None:
    name = "values.schema.json"
    new = json.loads((ROOT / "charts/stepkeeper" / name).read_bytes())
    assert unexplained(narrowed(json.loads(in_chart(release, name)), new)) == []


STEPS: Final = {"type": "integer", "minimum": 1}


@pytest.mark.parametrize(
    ("old", "new", "problems"),
    [
        ({}, {"properties": {"a": STEPS}}, []),
        ({"properties": {"a": STEPS}}, {}, [".a: is gone"]),
        ({"properties": {"a": STEPS}}, {"properties": {"a": STEPS}, "required": ["a"]}, [".a: is required"]),
        ({"properties": {}}, {"properties": {"a": STEPS | {"default": 1}}, "required": ["a"]}, []),
        ({"items": STEPS}, {"items": {"type": "string"}}, ["[]: type was integer"]),
        (STEPS, STEPS | {"minimum": 0}, []),
        (STEPS, {"type": "integer"}, []),
        (STEPS, STEPS | {"minimum": 2}, [": minimum was 1"]),
        (STEPS, STEPS | {"maximum": 9}, [": maximum was None"]),
        ({"maxLength": 9}, {"maxLength": 8}, [": maxLength was 9"]),
        ({"maxLength": 9}, {"maxLength": 10}, []),
        ({"enum": ["a"]}, {"enum": ["a", "b"]}, []),
        ({"enum": ["a", "b"]}, {"enum": ["a"]}, [": enum was ['a', 'b']"]),
        ({}, {"enum": ["a"]}, [": enum was None"]),
        ({"default": 1}, {"default": 2}, [": default was 1"]),
        ({}, {"x-kubernetes-validations": [{"rule": "r"}]}, [": has a new rule: r"]),
        ({"x-kubernetes-validations": [{"rule": "r"}]}, {}, []),
    ],
)  # fmt: skip
def test_a_schema_that_refuses_more_is_noticed(old: Schema, new: Schema, problems: list[str]) -> None:
    assert list(narrowed(old, new)) == problems
