"""The chart, rendered by Helm: what it gives the operator, and what it doesn't."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from stepcluster import binaries
from stepcluster.errors import CommandError
from stepcluster.machine import run

CHART = Path(__file__).parents[2] / "charts/stepkeeper"


@pytest.fixture(scope="module")
def helm() -> str:
    return binaries.ensure()["helm"]


def render(helm: str, *args: str) -> list[dict[str, Any]]:
    text = run(
        [helm, "template", "stepkeeper", CHART, "--namespace", "keeper", "--kube-version", "1.36.3", *args]
    )
    return [document for document in yaml.safe_load_all(text) if document]


@pytest.fixture(scope="module")
def objects(helm: str) -> dict[str, dict[str, Any]]:
    return {f"{o['kind']}/{o['metadata']['name']}": o for o in render(helm)}


@pytest.fixture(scope="module")
def pod(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec = objects["Deployment/stepkeeper-operator"]["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def test_helm_has_nothing_to_say_against_the_chart(helm: str) -> None:
    run([helm, "lint", "--strict", CHART])


def test_the_chart_makes_these_objects(objects: dict[str, dict[str, Any]]) -> None:
    assert sorted(objects) == [
        "ClusterRole/stepkeeper-editor",
        "ClusterRole/stepkeeper-operator",
        "ClusterRole/stepkeeper-viewer",
        "ClusterRoleBinding/stepkeeper-operator",
        "Deployment/stepkeeper-operator",
        "Role/stepkeeper-operator",
        "RoleBinding/stepkeeper-operator",
        "Service/stepkeeper-operator",
        "ServiceAccount/stepkeeper-operator",
        "ValidatingAdmissionPolicy/stepkeeper-operator-unknown-fields",
        "ValidatingAdmissionPolicyBinding/stepkeeper-operator-unknown-fields",
    ]


def test_unknown_fields_are_refused_by_the_policy_that_was_made_for_the_crd(
    objects: dict[str, dict[str, Any]],
) -> None:
    name = "stepkeeper-operator-unknown-fields"
    policy = objects[f"ValidatingAdmissionPolicy/{name}"]["spec"]
    assert policy == yaml.safe_load((CHART / "files/unknown-fields.yaml").read_text())
    binding = objects[f"ValidatingAdmissionPolicyBinding/{name}"]["spec"]
    assert binding == {"policyName": name, "validationActions": ["Deny"]}


def test_one_operator_at_a_time(objects: dict[str, dict[str, Any]]) -> None:
    spec = objects["Deployment/stepkeeper-operator"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_the_operator_is_nobody_on_a_read_only_disk(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_operator_is_told_its_names(pod: dict[str, Any]) -> None:
    env = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
    assert env["STEPKEEPER_OPERATOR_SERVICE_NAME"] == "stepkeeper-operator"
    assert env["STEPKEEPER_OPERATOR_LEASE_NAME"] == "stepkeeper-operator"
    assert env["STEPKEEPER_OPERATOR_TLS_SECRET_NAME"] == "stepkeeper-operator-tls"
    assert env["STEPKEEPER_OPERATOR_UNREACHABLE_TOLERATION_S"] == "30"
    assert {"STEPKEEPER_OPERATOR_NAMESPACE", "STEPKEEPER_OPERATOR_IDENTITY"} <= env.keys()
    assert not pod["enableServiceLinks"]


def test_no_rule_asks_for_everything(objects: dict[str, dict[str, Any]]) -> None:
    roles = [o for o in objects.values() if o["kind"] in ("ClusterRole", "Role")]
    rules = [rule for role in roles for rule in role["rules"]]
    assert [rule for rule in rules if "*" in rule["verbs"] + rule["resources"] + rule["apiGroups"]] == []


def test_secrets_are_out_of_reach_but_for_the_operators_own(objects: dict[str, dict[str, Any]]) -> None:
    everywhere = objects["ClusterRole/stepkeeper-operator"]["rules"]
    assert [rule for rule in everywhere if "secrets" in rule["resources"]] == []
    at_home = [r for r in objects["Role/stepkeeper-operator"]["rules"] if "secrets" in r["resources"]]
    assert [(rule["verbs"], rule.get("resourceNames")) for rule in at_home] == [
        (["create"], None),
        (["get", "update"], ["stepkeeper-operator-tls"]),
    ]


def test_what_the_user_sets_arrives(helm: str) -> None:
    settings = ("--set", "settings.unreachableTolerationSeconds=5", "--set", "settings.logLevel=DEBUG")
    image = (
        "--set",
        "image.repository=localhost/op",
        "--set",
        "image.tag=dev",
        "--set",
        "image.pullPolicy=Never",
    )
    (deployment,) = (
        o
        for o in render(helm, *settings, *image, "--set", "nodeSelector.pool=cpu")
        if o["kind"] == "Deployment"
    )
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert env["STEPKEEPER_OPERATOR_UNREACHABLE_TOLERATION_S"] == "5"
    assert env["STEPKEEPER_OPERATOR_LOG_LEVEL"] == "DEBUG"
    assert (container["image"], container["imagePullPolicy"]) == ("localhost/op:dev", "Never")
    assert spec["nodeSelector"] == {"pool": "cpu"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("setings.logLevel=DEBUG", "setings"),
        ("settings.logLevel=LOUD", "logLevel"),
        ("settings.leaseDurationSeconds=1", "leaseDurationSeconds"),
        ("replicas=2", "replicas"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm: str, value: str, said: str) -> None:
    with pytest.raises(CommandError, match=said):
        render(helm, "--set", value)


def test_a_release_of_another_name_has_names_of_its_own(helm: str) -> None:
    text = run([helm, "template", "team-a", CHART, "--kube-version", "1.36.3"])
    names = {document["metadata"]["name"] for document in yaml.safe_load_all(text) if document}
    assert {name.removesuffix("-unknown-fields").rpartition("-")[0] for name in names} == {
        "team-a-stepkeeper"
    }


def test_an_older_kubernetes_is_refused(helm: str) -> None:
    with pytest.raises(CommandError, match=r">=1\.32\.0-0"):
        run([helm, "template", "stepkeeper", CHART, "--kube-version", "1.31.0"])
