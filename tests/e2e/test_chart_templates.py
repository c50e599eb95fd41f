"""The chart, rendered by Helm: what it gives the operator, and what it doesn't."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepcluster import binaries
from stepcluster.errors import CommandError
from stepcluster.machine import run
from stepkeeper_operator.labels import JOB_UID_LABEL

CHART = Path(__file__).parents[2] / "charts/stepkeeper"
ON = "cloudTPU.enabled=true"
KUBERNETES = "1.36.3"

Objects = dict[str, dict[str, Any]]
"""By kind and name; and by namespace, where they have one of their own."""


def helm(*arguments: str) -> str:
    return run([binaries.ensure()["helm"], *arguments])


@cache
def render(*settings: str, release: str = "stepkeeper", kubernetes: str = KUBERNETES) -> Objects:
    options = ["--namespace", "keeper", "--kube-version", kubernetes, *(f"--set={each}" for each in settings)]
    found = yaml.safe_load_all(helm("template", release, str(CHART), *options))
    return {"/".join(name_parts(each)): each for each in found if each}


def name_parts(body: dict[str, Any]) -> list[str]:
    name, namespace = body["metadata"]["name"], body["metadata"].get("namespace", "keeper")
    return [body["kind"], name] if namespace == "keeper" else [body["kind"], name, namespace]


def pod_of(objects: Objects, name: str = "Deployment/stepkeeper-operator") -> dict[str, Any]:
    return dict(objects[name]["spec"]["template"]["spec"])


def container_of(objects: Objects, name: str = "Deployment/stepkeeper-operator") -> dict[str, Any]:
    (container,) = pod_of(objects, name)["containers"]
    return dict(container)


def env_of(objects: Objects) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container_of(objects)["env"]}


def rules_of(objects: Objects, role: str = "ClusterRole/stepkeeper-operator") -> set[tuple[str, str]]:
    """List what the operator may do in every namespace, or by another role, as pairs of a verb and a resource."""
    rules = objects[role]["rules"]
    return {(verb, resource) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


def mount_of(objects: Objects, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the operator's volume of that kind, and its mount."""
    (volume,) = (each for each in pod_of(objects)["volumes"] if kind in each)
    (mount,) = (m for m in container_of(objects)["volumeMounts"] if m["name"] == volume["name"])
    return volume[kind], mount


@pytest.mark.parametrize("enabled", ["false", "true"])
def test_helm_has_nothing_to_say_against_the_chart(enabled: str) -> None:
    helm("lint", "--strict", str(CHART), "--set", f"cloudTPU.enabled={enabled}")


def test_the_chart_makes_these_objects_and_these_with_cloud_tpu() -> None:
    objects = {
        "ClusterRole/stepkeeper-editor",
        "ClusterRole/stepkeeper-operator",
        "ClusterRole/stepkeeper-viewer",
        "ClusterRoleBinding/stepkeeper-operator",
        "Deployment/stepkeeper-operator",
        "Role/stepkeeper-operator",
        "RoleBinding/stepkeeper-operator",
        "Service/stepkeeper-operator",
        "ServiceAccount/stepkeeper-operator",
    }
    more = {"ClusterRole/stepkeeper-queued-resource-editor", "Job/stepkeeper-uninstall-check"}
    assert render().keys() == objects
    assert render(ON).keys() == objects | more


def test_one_operator_without_rights_on_a_read_only_disk() -> None:
    deployment = render()["Deployment/stepkeeper-operator"]["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    expected = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    assert pod_of(render())["securityContext"].items() >= expected.items()
    assert container_of(render())["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_operator_is_told_its_names_and_what_the_user_sets() -> None:
    prefix = "STEPKEEPER_OPERATOR_"
    env = env_of(render())
    assert env[f"{prefix}SERVICE_NAME"] == env[f"{prefix}LEASE_NAME"] == "stepkeeper-operator"
    assert env[f"{prefix}TLS_SECRET_NAME"] == "stepkeeper-operator-tls"
    assert env[f"{prefix}UNREACHABLE_TOLERATION_S"] == "30"
    assert {f"{prefix}NAMESPACE", f"{prefix}IDENTITY"} <= env.keys()
    image = ("image.repository=localhost/op", "image.tag=dev", "image.pullPolicy=Never")
    settings = ("settings.unreachableTolerationSeconds=5", "settings.logLevel=DEBUG", "nodeSelector.pool=cpu")
    objects = render(*settings, *image)
    assert env_of(objects)[f"{prefix}UNREACHABLE_TOLERATION_S"] == "5"
    assert env_of(objects)[f"{prefix}LOG_LEVEL"] == "DEBUG"
    container = container_of(objects)
    assert (container["image"], container["imagePullPolicy"]) == ("localhost/op:dev", "Never")
    assert pod_of(objects)["nodeSelector"] == {"pool": "cpu"}


def test_a_network_policy_lets_the_pods_of_jobs_report_from_every_namespace() -> None:
    assert not [name for name in render() if name.startswith("NetworkPolicy/")]
    objects = render("networkPolicy.enabled=true")
    assert objects.keys() - render().keys() == {"NetworkPolicy/stepkeeper-operator"}
    policy, service = (
        objects[f"{kind}/stepkeeper-operator"]["spec"] for kind in ("NetworkPolicy", "Service")
    )
    assert policy["podSelector"] == {"matchLabels": service["selector"]}
    assert policy["policyTypes"] == ["Ingress"], "the addresses of API servers and clouds can't be known here"
    (reports,) = policy["ingress"]
    assert reports["ports"] == [
        {"port": each["targetPort"]} for each in service["ports"] if each["name"] == "https"
    ]
    labelled = {"matchExpressions": [{"key": JOB_UID_LABEL, "operator": "Exists"}]}
    assert reports["from"] == [{"namespaceSelector": {}, "podSelector": labelled}]


def test_a_network_policy_names_who_else_reports_and_who_reads_metrics() -> None:
    nodes, prometheus = "ipBlock.cidr=10.128.0.0/20", "namespaceSelector.matchLabels.team=monitoring"
    values = (f"reportsFrom[0].{nodes}", f"metricsFrom[0].{prometheus}")
    objects = render("networkPolicy.enabled=true", *(f"networkPolicy.{each}" for each in values))
    reports, metrics = objects["NetworkPolicy/stepkeeper-operator"]["spec"]["ingress"]
    assert reports["from"][1:] == [{"ipBlock": {"cidr": "10.128.0.0/20"}}]
    assert metrics == {
        "from": [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}],
        "ports": [{"port": "metrics"}],
    }


def test_workloads_of_kueue_are_read_unless_that_is_switched_off() -> None:
    off = render("kueue.enabled=false")
    assert {verb for verb, resource in rules_of(render()) if resource == "workloads"} == {"list", "watch"}
    assert "workloads" not in {resource for _, resource in rules_of(off)}
    assert env_of(render())["STEPKEEPER_OPERATOR_KUEUE_ENABLED"] == "true"
    assert env_of(off)["STEPKEEPER_OPERATOR_KUEUE_ENABLED"] == "false"


def test_without_cloud_tpu_nothing_of_it_is_rendered_whatever_else_is_set() -> None:
    cloud = [
        "endpoint=a:1",
        "insecure=true",
        "credentialsSecret=key",
        "pollSeconds=3",
        "tokenAudience=somebody",
    ]
    secret = ("startupScriptSecrets[0].namespace=ml", "startupScriptSecrets[0].name=join")
    assert render(*(f"cloudTPU.{each}" for each in (*cloud, *secret))) == render()
    assert not [name for name in env_of(render()) if "CLOUD_TPU" in name or "GOOGLE" in name]


def test_in_watched_namespaces_roles_take_the_place_of_rights_in_the_cluster() -> None:
    whole, some = render(ON), render(ON, "watchNamespaces={ml,vision}")
    everywhere = {("list", "nodes"), ("watch", "nodes"), ("list", "leases"), ("create", "tokenreviews")}
    everywhere |= {("patch", "nodes"), ("delete", "nodes"), ("get", "namespaces")}
    assert rules_of(some) == everywhere
    for namespace in ("ml", "vision"):
        name = f"stepkeeper-operator-jobs/{namespace}"
        assert rules_of(some, f"Role/{name}") == rules_of(whole) - everywhere
        (subject,) = some[f"RoleBinding/{name}"]["subjects"]
        assert (subject["name"], subject["namespace"]) == ("stepkeeper-operator", "keeper")
        assert some[f"RoleBinding/{name}"]["roleRef"]["name"] == "stepkeeper-operator-jobs"
    assert len(some) == len(whole) + 4
    variable = {"name": "STEPKEEPER_OPERATOR_WATCH_NAMESPACES", "value": '["ml","vision"]'}
    assert variable in container_of(some)["env"]
    assert container_of(some, "Job/stepkeeper-uninstall-check")["env"] == [variable]
    assert variable["name"] not in env_of(whole)


def test_an_image_may_be_named_by_its_digest() -> None:
    digest = f"sha256:{'0a' * 32}"
    objects = render(ON, "image.repository=localhost/op", "image.tag=dev", f"image.digest={digest}")
    for name in ("Deployment/stepkeeper-operator", "Job/stepkeeper-uninstall-check"):
        assert container_of(objects, name)["image"] == f"localhost/op@{digest}"


def test_what_a_platform_adds_is_in_the_pod_and_beside_it() -> None:
    spread = "topologySpreadConstraints[0]"
    objects = render(
        "extraEnv[0].name=HTTPS_PROXY",
        "extraEnv[0].value=http://proxy:3128",
        f"{spread}.topologyKey=topology.kubernetes.io/zone",
        f"{spread}.maxSkew=1",
        f"{spread}.whenUnsatisfiable=ScheduleAnyway",
        "podDisruptionBudget.maxUnavailable=0",
        "serviceMonitor.enabled=true",
        "serviceMonitor.interval=30s",
        "serviceMonitor.labels.release=prometheus",
    )
    assert env_of(objects)["HTTPS_PROXY"] == "http://proxy:3128"
    labels = objects["Deployment/stepkeeper-operator"]["spec"]["template"]["metadata"]["labels"]
    (constraint,) = pod_of(objects)["topologySpreadConstraints"]
    assert constraint["topologyKey"] == "topology.kubernetes.io/zone"
    budget = objects["PodDisruptionBudget/stepkeeper-operator"]["spec"]
    assert budget["maxUnavailable"] == 0
    for selector in (constraint["labelSelector"], budget["selector"]):
        assert selector["matchLabels"].items() <= labels.items()
    monitor, service = objects["ServiceMonitor/stepkeeper-operator"], objects["Service/stepkeeper-operator"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint == {"port": "metrics", "interval": "30s"}
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert objects.keys() - render().keys() == {
        "PodDisruptionBudget/stepkeeper-operator",
        "ServiceMonitor/stepkeeper-operator",
    }


def test_a_silence_that_is_shorter_than_the_time_between_reports_is_refused() -> None:
    render("settings.reportIntervalSeconds=60", "settings.silenceSeconds=61")
    with pytest.raises(CommandError, match=r"silenceSeconds \(60\) has to be greater than .*\(60\)"):
        render("settings.reportIntervalSeconds=60", "settings.silenceSeconds=60")


def test_cloud_tpu_adds_these_rights_and_no_other() -> None:
    assert rules_of(render(ON)) - rules_of(render()) == {
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
    assert rules_of(render()) <= rules_of(render(ON))
    assert not [right for right in rules_of(render(ON)) if "*" in right]


def test_who_may_edit_in_a_namespace_may_look_at_queued_resources_but_not_spend_money() -> None:
    aggregated = {
        name: {resource for rule in role["rules"] for resource in rule["resources"]}
        for name, role in render(ON).items()
        if any("aggregate-to" in label for label in role["metadata"]["labels"])
    }
    assert "queuedresources" in aggregated["ClusterRole/stepkeeper-viewer"]
    assert "queuedresources" not in aggregated["ClusterRole/stepkeeper-editor"]
    assert "ClusterRole/stepkeeper-queued-resource-editor" not in aggregated


@pytest.mark.parametrize(("idle_s", "least_s"), [(60, 72), (7, 9), (100, 120)])
def test_losses_that_would_be_seen_too_late_are_refused(idle_s: int, least_s: int) -> None:
    idle, seconds = f"cloudTPU.idlePollSeconds={idle_s}", "settings.reattributionSeconds"
    render(ON, idle, f"{seconds}={least_s}")
    render(idle, f"{seconds}=0")
    with pytest.raises(CommandError, match=f"{seconds} has to be at least {least_s}"):
        render(ON, idle, f"{seconds}={least_s - 1}")


def test_credentials_are_a_file_that_may_be_missing() -> None:
    assert "GOOGLE_APPLICATION_CREDENTIALS" not in env_of(render(ON))
    objects = render(ON, "cloudTPU.credentialsSecret=key")
    secret, mount = mount_of(objects, "secret")
    assert secret == {"secretName": "key", "optional": True, "defaultMode": 0o440}
    assert mount["readOnly"]
    assert env_of(objects)["GOOGLE_APPLICATION_CREDENTIALS"] == f"{mount['mountPath']}/credentials.json"


def test_a_federated_identity_has_a_token_of_the_operators_account() -> None:
    assert not [volume for volume in pod_of(render(ON))["volumes"] if "projected" in volume]
    audience = "https://iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/c"
    objects = render(ON, "cloudTPU.credentialsSecret=cloud-tpu", f"cloudTPU.tokenAudience={audience}")
    projected, mount = mount_of(objects, "projected")
    (source,) = projected["sources"]
    token = source["serviceAccountToken"]
    assert (token["audience"], token["path"]) == (audience, "token")
    assert projected["defaultMode"] & 0o007 == 0
    assert (mount["mountPath"], mount["readOnly"]) == ("/var/run/secrets/cloud-tpu-token", True)
    assert f"{mount['mountPath']}/{token['path']}" in (CHART / "values.yaml").read_text()
    assert pod_of(objects)["automountServiceAccountToken"], "the API server's token is another one"


def test_of_the_users_secrets_the_operator_reads_the_named_ones() -> None:
    secrets = [("ml", "join"), ("ml", "join-k3s"), ("vision", "join")]
    settings = [
        f"cloudTPU.startupScriptSecrets[{index}].{key}={value}"
        for index, secret in enumerate(secrets)
        for key, value in zip(("namespace", "name"), secret, strict=True)
    ]
    objects = render(ON, *settings)
    name = "stepkeeper-operator-startup-scripts"
    for namespace, names in (("ml", ["join", "join-k3s"]), ("vision", ["join"])):
        rule = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": names, "verbs": ["get"]}
        assert objects[f"Role/{name}/{namespace}"]["rules"] == [rule]
        (subject,) = objects[f"RoleBinding/{name}/{namespace}"]["subjects"]
        assert subject["namespace"] == "keeper"
    assert len(objects) == len(render(ON)) + 4


def test_an_uninstallation_is_checked_by_the_operators_image_and_account() -> None:
    objects, name = render(ON), "Job/stepkeeper-uninstall-check"
    assert objects[name]["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    container, operator = container_of(objects, name), container_of(objects)
    assert container["args"] == ["check-uninstall"]
    assert (container["image"], container["securityContext"]) == (
        operator["image"],
        operator["securityContext"],
    )
    assert pod_of(objects, name)["serviceAccountName"] == pod_of(objects)["serviceAccountName"]
    selector = objects["Service/stepkeeper-operator"]["spec"]["selector"]
    labels = objects[name]["spec"]["template"]["metadata"]["labels"]
    assert not selector.items() <= labels.items(), "the Service would send reports to it"
    assert render(ON, "cloudTPU.uninstallCheck=false") == {
        key: each for key, each in objects.items() if key != name
    }


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("setings.logLevel=DEBUG", "setings"),
        ("settings.logLevel=LOUD", "logLevel"),
        ("settings.leaseDurationSeconds=1", "leaseDurationSeconds"),
        ("replicas=2", "replicas"),
        ("networkPolicy.enabled=yes please", "enabled"),
        ("networkPolicy.from=all", "from"),
        ("networkPolicy.reportsFrom[0].cidr=10.0.0.0/8", "cidr"),
        ("cloudTPU.enable=true", "enable"),
        ("cloudTPU.insecure=true", "endpoint"),
        ("cloudTPU.tokenAudience=somebody", "credentialsSecret"),
        ("cloudTPU.endpoint=https://tpu.example.com", "endpoint"),
        (r"podLabels.app\.kubernetes\.io/name=evil", "podLabels"),
        (r"podLabels.helm\.sh/chart=evil", "podLabels"),
        ("watchNamespaces={Team}", "watchNamespaces"),
        ("image.digest=latest", "digest"),
        ("podDisruptionBudget.minimum=1", "podDisruptionBudget"),
    ],
)
def test_a_wrong_value_is_refused_by_name(value: str, said: str) -> None:
    with pytest.raises(CommandError, match=said):
        render(value)


def test_a_release_of_another_name_has_names_of_its_own() -> None:
    names = {body["metadata"]["name"] for body in render(release="team-a").values()}
    assert {name.rpartition("-")[0] for name in names} == {"team-a-stepkeeper"}


def test_an_older_kubernetes_is_refused() -> None:
    with pytest.raises(CommandError, match=r">=1\.32\.0-0"):
        render(kubernetes="1.31.0")
