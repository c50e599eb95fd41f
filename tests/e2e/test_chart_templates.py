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


@pytest.mark.parametrize("enabled", ["false", "true"])
def test_helm_has_nothing_to_say_against_the_chart(helm: str, enabled: str) -> None:
    run([helm, "lint", "--strict", CHART, "--set", f"cloudTPU.enabled={enabled}"])


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
    ]


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


CLOUD_TPU = ("--set", "cloudTPU.enabled=true")


def by_name(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {f"{o['kind']}/{o['metadata']['name']}": o for o in documents}


@pytest.fixture(scope="module")
def with_cloud(helm: str) -> dict[str, dict[str, Any]]:
    return by_name(render(helm, *CLOUD_TPU))


def container_of(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (container,) = objects["Deployment/stepkeeper-operator"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def env_of(objects: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {v["name"]: v["value"] for v in container_of(objects)["env"] if "value" in v}


def rules_of(objects: dict[str, dict[str, Any]]) -> set[tuple[str, str]]:
    """List what the operator may do in every namespace, as pairs of a verb and a resource."""
    rules = objects["ClusterRole/stepkeeper-operator"]["rules"]
    return {(verb, resource) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


def test_workloads_of_kueue_are_read_unless_that_is_switched_off(
    helm: str, objects: dict[str, dict[str, Any]]
) -> None:
    off = by_name(render(helm, "--set", "kueue.enabled=false"))
    assert {verb for verb, resource in rules_of(objects) if resource == "workloads"} == {"list", "watch"}
    assert "workloads" not in {resource for _, resource in rules_of(off)}
    assert env_of(objects)["STEPKEEPER_OPERATOR_KUEUE_ENABLED"] == "true"
    assert env_of(off)["STEPKEEPER_OPERATOR_KUEUE_ENABLED"] == "false"


def test_without_cloud_tpu_nothing_of_it_is_rendered(helm: str, objects: dict[str, dict[str, Any]]) -> None:
    """Whatever else is set: off is off."""
    off = render(
        helm,
        "--set",
        "cloudTPU.endpoint=a:1,cloudTPU.insecure=true,cloudTPU.credentialsSecret=key,cloudTPU.pollSeconds=3,"
        "cloudTPU.tokenAudience=somebody",
        "--set",
        "cloudTPU.startupScriptSecrets[0].namespace=ml,cloudTPU.startupScriptSecrets[0].name=join",
    )
    assert by_name(off) == objects
    roles = [rule for o in objects.values() if o["kind"] in ("ClusterRole", "Role") for rule in o["rules"]]
    assert not {resource for rule in roles for resource in rule["resources"]} & {
        "queuedresources",
        "pods/eviction",
        "namespaces",
    }
    assert not [name for name in env_of(objects) if "CLOUD_TPU" in name or "GOOGLE" in name]


def test_cloud_tpu_adds_these_rights_and_no_other(
    objects: dict[str, dict[str, Any]], with_cloud: dict[str, dict[str, Any]]
) -> None:
    assert rules_of(with_cloud) - rules_of(objects) == {
        ("get", "queuedresources"),
        ("list", "queuedresources"),
        ("watch", "queuedresources"),
        ("patch", "queuedresources"),
        ("patch", "queuedresources/status"),
        ("update", "queuedresources/finalizers"),
        ("patch", "nodes"),
        ("delete", "nodes"),
        ("create", "pods/eviction"),
        ("get", "namespaces"),
    }
    assert rules_of(objects) <= rules_of(with_cloud)
    assert not [right for right in rules_of(with_cloud) if "*" in right]


def test_who_may_edit_in_a_namespace_may_look_at_queued_resources_but_not_spend_money(
    with_cloud: dict[str, dict[str, Any]],
) -> None:
    aggregated = {
        name: {resource for rule in role["rules"] for resource in rule["resources"]}
        for name, role in with_cloud.items()
        if any("aggregate-to" in label for label in role["metadata"]["labels"])
    }
    assert "queuedresources" in aggregated["ClusterRole/stepkeeper-viewer"]
    assert "queuedresources" not in aggregated["ClusterRole/stepkeeper-editor"]
    assert "ClusterRole/stepkeeper-queued-resource-editor" not in aggregated


def test_cloud_tpu_is_told_to_the_operator(helm: str, with_cloud: dict[str, dict[str, Any]]) -> None:
    prefix = "STEPKEEPER_OPERATOR_CLOUD_TPU_"
    assert {name: value for name, value in env_of(with_cloud).items() if name.startswith(prefix)} == {
        f"{prefix}ENABLED": "true",
        f"{prefix}INSECURE": "false",
        f"{prefix}POLL_S": "10",
        f"{prefix}IDLE_POLL_S": "60",
        f"{prefix}QUOTA_RETRY_S": "300",
    }
    values = "cloudTPU.endpoint=10.0.0.1:8470,cloudTPU.insecure=true,cloudTPU.pollSeconds=1"
    env = env_of(by_name(render(helm, *CLOUD_TPU, "--set", values)))
    assert env[f"{prefix}ENDPOINT"] == "10.0.0.1:8470"
    assert (env[f"{prefix}INSECURE"], env[f"{prefix}POLL_S"]) == ("true", "1")


@pytest.mark.parametrize(("idle_s", "least_s"), [(60, 72), (7, 9), (100, 120)])
def test_losses_that_would_be_seen_too_late_are_refused(helm: str, idle_s: int, least_s: int) -> None:
    def values(reattribution_s: int) -> str:
        return f"cloudTPU.idlePollSeconds={idle_s},settings.reattributionSeconds={reattribution_s}"

    render(helm, *CLOUD_TPU, "--set", values(least_s))
    render(helm, "--set", values(0))
    with pytest.raises(CommandError, match=f"settings.reattributionSeconds has to be at least {least_s}"):
        render(helm, *CLOUD_TPU, "--set", values(least_s - 1))


def test_credentials_are_a_file_that_may_be_missing(helm: str, with_cloud: dict[str, dict[str, Any]]) -> None:
    assert "GOOGLE_APPLICATION_CREDENTIALS" not in env_of(with_cloud)
    objects = by_name(render(helm, *CLOUD_TPU, "--set", "cloudTPU.credentialsSecret=key"))
    spec = objects["Deployment/stepkeeper-operator"]["spec"]["template"]["spec"]
    (volume,) = (volume for volume in spec["volumes"] if "secret" in volume)
    (mount,) = (m for m in container_of(objects)["volumeMounts"] if m["name"] == volume["name"])
    assert volume["secret"] == {"secretName": "key", "optional": True, "defaultMode": 0o440}
    assert mount["readOnly"]
    path = env_of(objects)["GOOGLE_APPLICATION_CREDENTIALS"]
    assert path == f"{mount['mountPath']}/credentials.json"


def test_a_federated_identity_has_a_token_of_the_operators_account(
    helm: str, with_cloud: dict[str, dict[str, Any]]
) -> None:
    spec = with_cloud["Deployment/stepkeeper-operator"]["spec"]["template"]["spec"]
    assert not [volume for volume in spec["volumes"] if "projected" in volume]
    audience = "https://iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/c"
    values = f"cloudTPU.credentialsSecret=cloud-tpu,cloudTPU.tokenAudience={audience}"
    objects = by_name(render(helm, *CLOUD_TPU, "--set", values))
    spec = objects["Deployment/stepkeeper-operator"]["spec"]["template"]["spec"]
    (volume,) = (volume for volume in spec["volumes"] if "projected" in volume)
    (source,) = volume["projected"]["sources"]
    token = source["serviceAccountToken"]
    assert (token["audience"], token["path"]) == (audience, "token")
    assert volume["projected"]["defaultMode"] & 0o007 == 0
    (mount,) = (m for m in container_of(objects)["volumeMounts"] if m["name"] == volume["name"])
    assert (mount["mountPath"], mount["readOnly"]) == ("/var/run/secrets/cloud-tpu-token", True)
    assert f"{mount['mountPath']}/{token['path']}" in (CHART / "values.yaml").read_text()
    assert spec["automountServiceAccountToken"], "the API server's token is another one"


def test_of_the_users_secrets_the_operator_reads_the_named_ones(helm: str) -> None:
    secrets = [("ml", "join"), ("ml", "join-k3s"), ("vision", "join")]
    options = [
        option
        for index, (namespace, name) in enumerate(secrets)
        for key, value in (("namespace", namespace), ("name", name))
        for option in ("--set", f"cloudTPU.startupScriptSecrets[{index}].{key}={value}")
    ]
    documents = render(helm, *CLOUD_TPU, *options)
    name = "stepkeeper-operator-startup-scripts"
    roles = [o for o in documents if o["kind"] == "Role" and o["metadata"]["name"] == name]
    assert {role["metadata"]["namespace"]: role["rules"] for role in roles} == {
        namespace: [{"apiGroups": [""], "resources": ["secrets"], "resourceNames": names, "verbs": ["get"]}]
        for namespace, names in (("ml", ["join", "join-k3s"]), ("vision", ["join"]))
    }
    bindings = [o for o in documents if o["kind"] == "RoleBinding" and o["metadata"]["name"] == name]
    assert {binding["metadata"]["namespace"] for binding in bindings} == {"ml", "vision"}
    assert {subject["namespace"] for binding in bindings for subject in binding["subjects"]} == {"keeper"}


def test_an_uninstallation_is_checked_by_the_operators_image_and_account(
    helm: str, with_cloud: dict[str, dict[str, Any]]
) -> None:
    job = with_cloud["Job/stepkeeper-uninstall-check"]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    operator = with_cloud["Deployment/stepkeeper-operator"]["spec"]["template"]["spec"]
    assert container["image"] == operator["containers"][0]["image"]
    assert container["args"] == ["check-uninstall"]
    assert container["securityContext"] == operator["containers"][0]["securityContext"]
    assert spec["serviceAccountName"] == operator["serviceAccountName"]
    selector = with_cloud["Service/stepkeeper-operator"]["spec"]["selector"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert not selector.items() <= labels.items(), "the Service would send reports to it"
    off = by_name(render(helm, *CLOUD_TPU, "--set", "cloudTPU.uninstallCheck=false"))
    assert off == {name: o for name, o in with_cloud.items() if o["kind"] != "Job"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("setings.logLevel=DEBUG", "setings"),
        ("settings.logLevel=LOUD", "logLevel"),
        ("settings.leaseDurationSeconds=1", "leaseDurationSeconds"),
        ("replicas=2", "replicas"),
        ("cloudTPU.enable=true", "enable"),
        ("cloudTPU.insecure=true", "endpoint"),
        ("cloudTPU.tokenAudience=somebody", "credentialsSecret"),
        ("cloudTPU.endpoint=https://tpu.example.com", "endpoint"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm: str, value: str, said: str) -> None:
    with pytest.raises(CommandError, match=said):
        render(helm, "--set", value)


def test_a_release_of_another_name_has_names_of_its_own(helm: str) -> None:
    text = run([helm, "template", "team-a", CHART, "--kube-version", "1.36.3"])
    names = {document["metadata"]["name"] for document in yaml.safe_load_all(text) if document}
    assert {name.rpartition("-")[0] for name in names} == {"team-a-stepkeeper"}


def test_an_older_kubernetes_is_refused(helm: str) -> None:
    with pytest.raises(CommandError, match=r">=1\.32\.0-0"):
        run([helm, "template", "stepkeeper", CHART, "--kube-version", "1.31.0"])
