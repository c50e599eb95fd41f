"""Test the CRD that is generated from the types."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepkeeper_operator.api.v1alpha1.rules import RULES, CelRule
from stepkeeper_operator.crds.__main__ import main
from stepkeeper_operator.crds.crd import training_job_crd, training_job_schema
from stepkeeper_operator.crds.unknown_fields import POLICY_NAME, unknown_fields_policy

ROOT = Path(__file__).parents[3]
FILE = "checkpointedtrainingjobs.stepkeeper.dev.yaml"
MANIFESTS = ROOT / "tests/data/crd"


def own_fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """List our own fields: all but the pod template's."""
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}".lstrip(".")
        yield here, field
        if here != "spec.template":
            yield from own_fields(field, here)
            yield from own_fields(field.get("items", {}), f"{here}[]")


@pytest.fixture(scope="module")
def version() -> dict[str, Any]:
    (only,) = training_job_crd()["spec"]["versions"]
    assert isinstance(only, dict)
    return only


@pytest.fixture(scope="module")
def fields(version: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(own_fields(version["schema"]["openAPIV3Schema"]))


@pytest.mark.parametrize(
    "file",
    [
        f"crds/{FILE}",
        f"crds/{POLICY_NAME}.yaml",
        f"charts/stepkeeper/crds/{FILE}",
        "charts/stepkeeper/files/unknown-fields.yaml",
        "docs/user/job-reference.md",
    ],
)
def test_the_committed_file_is_the_one_that_make_generate_writes(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert main() == 0
    assert (ROOT / file).read_text() == (tmp_path / file).read_text(), "run `make generate`"


def test_generate_writes_nothing_outside_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main() == 2
    assert "root of the repository" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_client_side_apply_can_carry_it_in_an_annotation() -> None:
    assert len(json.dumps(training_job_crd())) < 200_000 < 256 * 1024


def test_there_are_no_floats(fields: dict[str, dict[str, Any]]) -> None:
    assert {f["type"] for f in fields.values()} <= {"object", "array", "string", "integer", "boolean"}


def test_every_field_says_what_it_is(fields: dict[str, dict[str, Any]]) -> None:
    told_by_kubernetes = {"apiVersion", "kind", "metadata", "spec.template"}
    assert fields["spec.template"]["description"]
    assert [
        path for path, f in fields.items() if "description" not in f and path not in told_by_kubernetes
    ] == []


def test_lists_and_strings_are_bounded(fields: dict[str, dict[str, Any]]) -> None:
    lists = {path: f for path, f in fields.items() if f["type"] == "array"}
    assert [path for path, f in lists.items() if "maxItems" not in f] == []
    strings = {
        path: f for path, f in fields.items() if f["type"] == "string" and path not in ("apiVersion", "kind")
    }
    assert [path for path, f in strings.items() if not f.keys() & {"maxLength", "enum", "format"}] == []


def test_status_says_nothing_that_the_operator_did_not_write(fields: dict[str, dict[str, Any]]) -> None:
    assert [path for path, f in fields.items() if path.startswith("status") and "default" in f] == []


def test_the_default_of_an_object_has_the_defaults_of_its_fields(fields: dict[str, dict[str, Any]]) -> None:
    assert fields["spec.restarts"]["default"] == {
        "maxFailures": 3,
        "resetOnNewCheckpoint": True,
        "fatalExitCodes": [],
        "backoff": {"initialSeconds": 10, "maxSeconds": 600},
    }


def test_conditions_are_told_apart_by_type(fields: dict[str, dict[str, Any]]) -> None:
    conditions = fields["status.conditions"]
    assert (conditions["x-kubernetes-list-type"], conditions["x-kubernetes-list-map-keys"]) == (
        "map",
        ["type"],
    )


def test_the_columns_are_the_ones_that_are_computed(version: dict[str, Any]) -> None:
    assert [column["name"] for column in version["additionalPrinterColumns"]] == [
        "Phase",
        "Step",
        "Committed",
        "Restarts",
        "Age",
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.at or 'object'}: {rule.message[:30]}")
def test_each_rule_has_a_manifest_that_it_refuses(rule: CelRule) -> None:
    expected = [path.read_text().splitlines()[0] for path in (MANIFESTS / "refused").glob("*.yaml")]
    assert f"# {rule.message}" in expected


def test_accepted_manifests_ask_for_everything_that_can_be_asked_for(
    fields: dict[str, dict[str, Any]],
) -> None:
    asked: set[str] = set()
    for path in (MANIFESTS / "accepted").glob("*.yaml"):
        asked |= set(paths_of(yaml.safe_load(path.read_text())["spec"], "spec"))
    assert {path for path in fields if path.startswith("spec.")} <= asked


def test_what_the_schema_keeps_the_policy_looks_through(fields: dict[str, dict[str, Any]]) -> None:
    keep = "x-kubernetes-preserve-unknown-fields"
    kept = {path for path, field in fields.items() if field.get(keep)}
    assert "spec.checkpoint.interval" in kept
    assert not {path for path in kept if path.startswith(("spec.template", "status", "metadata"))}
    policy = unknown_fields_policy(training_job_schema())
    assert {variable["name"] for variable in policy["variables"]} == {path.replace(".", "_") for path in kept}
    assert len(policy["validations"]) == len(kept)


def test_the_policy_is_no_template_of_helm() -> None:
    assert "{{" not in (ROOT / "charts/stepkeeper/files/unknown-fields.yaml").read_text()


def paths_of(value: object, path: str) -> Iterator[str]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths_of(item, f"{path}.{key}")
