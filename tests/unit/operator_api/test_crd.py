"""Test the CRDs that are generated from the types, and their pages."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepkeeper_operator.api.cel import CelRule
from stepkeeper_operator.api.v1alpha1 import queuedresource_rules, rules
from stepkeeper_operator.crds.__main__ import generate, main
from stepkeeper_operator.crds.crd import ResourceDefinition, build_crd
from stepkeeper_operator.crds.kinds import KINDS, QUEUED_RESOURCE, TRAINING_JOB

ROOT = Path(__file__).parents[3]
MANIFESTS = {
    TRAINING_JOB.kind: ROOT / "tests/data/crd",
    QUEUED_RESOURCE.kind: ROOT / "tests/data/crd/queuedresources",
}


def own_fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """List our own fields: all but the pod template's."""
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}".lstrip(".")
        yield here, field
        if here != "spec.template":
            yield from own_fields(field, here)
            yield from own_fields(field.get("items", {}), f"{here}[]")


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.kind)
def definition(request: pytest.FixtureRequest) -> ResourceDefinition:
    assert isinstance(request.param, ResourceDefinition)
    return request.param


@pytest.fixture(scope="module")
def fields(definition: ResourceDefinition) -> dict[str, dict[str, Any]]:
    (version,) = build_crd(definition)["spec"]["versions"]
    return dict(own_fields(version["schema"]["openAPIV3Schema"]))


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make generate` writes, in a folder of its own."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / "pyproject.toml").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main() == 0
    return folder


@pytest.mark.parametrize(
    "file",
    [str(path) for definition in KINDS for path in generate(definition)],
    ids=str,
)
def test_the_committed_file_is_the_one_that_make_generate_writes(file: str, generated: Path) -> None:
    assert (ROOT / file).read_text() == (generated / file).read_text(), "run `make generate`"


def test_accepted_manifests_ask_for_everything_that_can_be_asked_for(
    definition: ResourceDefinition, fields: dict[str, dict[str, Any]]
) -> None:
    asked: set[str] = set()
    for path in (MANIFESTS[definition.kind] / "accepted").glob("*.yaml"):
        asked |= set(paths_of(yaml.safe_load(path.read_text())["spec"], "spec"))
    assert {path for path in fields if path.startswith("spec.")} <= asked


def test_a_status_of_a_newer_operator_is_kept_whole(fields: dict[str, dict[str, Any]]) -> None:
    """An apply of one field that a schema neither has nor keeps is refused: no status would be written any more."""
    objects = {
        path
        for path, field in fields.items()
        if {**field, **field.get("items", {})}["type"] == "object" and "additionalProperties" not in field
    }
    in_status = {path for path in objects if path.partition(".")[0] == "status"}
    assert len(in_status) > 3
    keep = "x-kubernetes-preserve-unknown-fields"
    assert {
        path for path, field in fields.items() if {**field, **field.get("items", {})}.get(keep)
    } == in_status


def test_of_a_spec_unknown_fields_are_kept_nowhere(definition: ResourceDefinition) -> None:
    """So the API server refuses them, or drops them for clients that don't ask for validation."""
    (version,) = build_crd(definition)["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert "x-kubernetes-preserve-unknown-fields" not in json.dumps(spec)


def test_the_page_shows_placeholders_and_hides_none_as_html(definition: ResourceDefinition) -> None:
    page = (ROOT / definition.page).read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if "<" in line and not line.startswith("<!--")] == []


def paths_of(value: object, path: str) -> Iterator[str]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths_of(item, f"{path}.{key}")
    if isinstance(value, list):
        for item in value:
            yield from paths_of(item, f"{path}[]")


RULES = [
    *((TRAINING_JOB, rule) for rule in rules.RULES),
    *((QUEUED_RESOURCE, rule) for rule in queuedresource_rules.RULES),
]


@pytest.mark.parametrize(("kind", "rule"), RULES, ids=lambda each: getattr(each, "message", "")[:40])
def test_each_rule_has_a_manifest_that_it_refuses(kind: ResourceDefinition, rule: CelRule) -> None:
    changes = kind is QUEUED_RESOURCE and "oldSelf" in rule.cel
    folder = MANIFESTS[kind.kind] / ("changes-refused" if changes else "refused")
    first_lines = [path.read_text(encoding="utf-8").splitlines()[0] for path in folder.glob("*.yaml")]
    assert f"# {rule.message}" in first_lines


def test_each_column_shows_a_field_that_is_there(
    definition: ResourceDefinition, fields: dict[str, dict[str, Any]]
) -> None:
    paths = {column.path.removeprefix(".") for column in definition.columns}
    assert paths - {"metadata.creationTimestamp"} <= fields.keys()


def test_fields_are_bounded_and_say_what_they_are(fields: dict[str, dict[str, Any]]) -> None:
    told_by_kubernetes = {"apiVersion", "kind", "metadata"}
    assert fields["status.conditions"]["x-kubernetes-list-map-keys"] == ["type"]
    for path, field in fields.items():
        if path not in told_by_kubernetes:
            assert "description" in field, path
        if field["type"] == "array":
            assert "maxItems" in field, path
        if field["type"] == "string" and path not in told_by_kubernetes:
            assert field.keys() & {"maxLength", "enum", "format"}, path
        if "additionalProperties" in field:
            assert "maxProperties" in field, path
            assert "maxLength" in field["additionalProperties"], path
        assert field["type"] in {"object", "array", "string", "integer", "boolean"}, path
        assert not (path.startswith("status") and "default" in field), "the operator didn't write it"
