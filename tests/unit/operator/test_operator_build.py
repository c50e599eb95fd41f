"""Test the manifests: golden files for the whole, and one test for each part that must never go missing."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fake_cluster.world import training_job
from stepkeeper.contract import Best, BestMode, Identity, Retention, Settings
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.build import build_config_map, build_jobset, template_hash
from stepkeeper_operator.settings import OperatorSettings

GOLDEN = Path(__file__).parents[2] / "data/operator"
TPU = {"tpu": {"accelerator": "v5p", "topology": "2x2x2", "slices": 2, "provisioning": "Spot"}}


def job(**spec: Any) -> CheckpointedTrainingJob:
    raw = training_job(**spec)
    raw["metadata"] |= {"uid": "11111111-2222", "labels": {"kueue.x-k8s.io/queue-name": "tpus", "team": "a"}}
    return CheckpointedTrainingJob.model_validate(raw)


def jobset(**spec: Any) -> dict[str, Any]:
    return build_jobset(job(**spec), number=3, failures_left=5, unreachable_s=30)


def pod_spec(manifest: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return spec


def trainer(manifest: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = pod_spec(manifest)["containers"][0]
    return container


@pytest.mark.parametrize(("name", "placement"), [("hosts", {"hosts": {"count": 2}}), ("tpu-spot", TPU)])
def test_the_jobset_is_the_golden_one(name: str, placement: dict[str, Any]) -> None:
    path = GOLDEN / f"jobset-{name}.yaml"
    manifest = jobset(placement=placement, restarts={"fatalExitCodes": [3, 75]})
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == json.loads(json.dumps(manifest))


def test_building_twice_gives_the_same_and_leaves_the_job_alone() -> None:
    given = job(placement=TPU)
    before = given.model_dump_json()
    first = build_jobset(given, number=0, failures_left=1, unreachable_s=5)
    assert build_jobset(given, number=0, failures_left=1, unreachable_s=5) == first
    assert given.model_dump_json() == before


def test_every_variable_of_the_identity_is_set_and_no_other() -> None:
    names = [variable["name"] for variable in trainer(jobset())["env"]]
    assert sorted(names) == sorted(Identity.variables())


def test_the_users_variables_can_refer_to_the_identity() -> None:
    container = {
        "name": "trainer",
        "image": "x",
        "env": [{"name": "RANK", "value": "$(STEPKEEPER_HOST_INDEX)"}],
    }
    names = [
        variable["name"]
        for variable in trainer(jobset(template={"spec": {"containers": [container]}}))["env"]
    ]
    assert names.index("STEPKEEPER_HOST_INDEX") < names.index("RANK")


def test_the_runtime_is_told_where_the_template_wants_the_last_word() -> None:
    def told(**fields: str) -> tuple[str | None, str]:
        container = {"name": "trainer", "image": "x", **fields}
        built = trainer(jobset(template={"spec": {"containers": [container]}}))
        values = {variable["name"]: variable.get("value") for variable in built["env"]}
        return built.get("terminationMessagePath"), str(values["STEPKEEPER_TERMINATION_FILE"])

    assert told() == (None, "/dev/termination-log")
    assert told(terminationMessagePath="/tmp/t") == ("/tmp/t", "/tmp/t")


def test_every_container_leaves_the_end_of_its_log_unless_the_template_says_otherwise() -> None:
    spec = {
        "initContainers": [{"name": "init", "image": "x"}],
        "containers": [
            {"name": "trainer", "image": "x"},
            {"name": "logs", "image": "y", "terminationMessagePolicy": "File"},
        ],
    }
    built = pod_spec(jobset(template={"spec": spec}))
    found = {c["name"]: c["terminationMessagePolicy"] for c in built["initContainers"] + built["containers"]}
    assert found == {
        "init": "FallbackToLogsOnError",
        "trainer": "FallbackToLogsOnError",
        "logs": "File",
    }


def test_spot_machines_leave_15_seconds_and_others_what_the_template_says() -> None:
    def grace(manifest: dict[str, Any]) -> str:
        values = {variable["name"]: variable.get("value") for variable in trainer(manifest)["env"]}
        return str(values["STEPKEEPER_GRACE_S"])

    container = {"name": "trainer", "image": "x"}
    template = {"spec": {"terminationGracePeriodSeconds": 90, "containers": [container]}}
    assert grace(jobset()) == "30"
    assert grace(jobset(template=template)) == "90"
    assert grace(jobset(placement=TPU, template=template)) == "15"


def test_what_the_template_says_of_its_own_is_kept() -> None:
    container = {
        "name": "trainer",
        "image": "x",
        "env": [{"name": "MINE", "value": "1"}],
        "lifecycle": {"preStop": {"exec": {"command": ["./stop"]}}},
        "resources": {"limits": {"memory": "1Gi"}},
    }
    sidecar = {"name": "logs", "image": "y"}
    toleration = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 5}
    spec = {"containers": [container, sidecar], "tolerations": [toleration], "nodeSelector": {"disk": "ssd"}}
    manifest = jobset(placement=TPU, template={"metadata": {"labels": {"mine": "1"}}, "spec": spec})
    built = pod_spec(manifest)
    assert trainer(manifest)["env"][-1] == {"name": "MINE", "value": "1"}
    assert trainer(manifest)["lifecycle"] == container["lifecycle"]
    assert trainer(manifest)["resources"]["limits"] == {"memory": "1Gi", "google.com/tpu": "4"}
    assert built["containers"][1].items() >= sidecar.items()
    assert built["nodeSelector"]["disk"] == "ssd"
    assert [t for t in built["tolerations"] if t.get("key") == toleration["key"]] == [toleration]


def test_a_pod_that_saves_while_its_node_shuts_down_is_not_deleted_for_it() -> None:
    manifest = build_jobset(job(), number=0, failures_left=0, unreachable_s=5)
    seconds = {t["key"]: t["tolerationSeconds"] for t in pod_spec(manifest)["tolerations"]}
    assert seconds == {"node.kubernetes.io/unreachable": 5, "node.kubernetes.io/not-ready": 60}


def test_a_toleration_that_lets_pods_be_scheduled_says_nothing_of_how_long_they_stay() -> None:
    scheduled = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoSchedule"}
    template = {"spec": {"containers": [{"name": "trainer", "image": "x"}], "tolerations": [scheduled]}}
    ours, *_, last = pod_spec(jobset(template=template))["tolerations"]
    assert (ours["key"], ours["effect"], last) == (scheduled["key"], "NoExecute", scheduled)


def test_jobset_restarts_failures_by_itself_twice_at_most_and_never_more_often_than_the_job_may() -> None:
    def allowed(failures_left: int) -> int:
        manifest = build_jobset(job(), number=0, failures_left=failures_left, unreachable_s=5)
        return int(manifest["spec"]["failurePolicy"]["maxRestarts"])

    assert [allowed(left) for left in (0, 1, 2, 3, 100)] == [0, 1, 2, 2, 2]


def test_conditions_come_before_exit_codes_since_a_preempted_trainer_exits_75_too() -> None:
    rules = jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    kinds = ["condition" if "onPodConditions" in rule else "code" for rule in rules]
    assert kinds == sorted(kinds, reverse=True)


def test_queue_labels_go_to_the_jobset_and_others_do_not() -> None:
    labels = jobset()["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "tpus"
    assert "team" not in labels


def test_parameters_of_a_provisioning_request_go_to_the_jobset_and_other_annotations_do_not() -> None:
    raw = training_job()
    wanted = {"provreq.kueue.x-k8s.io/maxRunDurationSeconds": "3600"}
    raw["metadata"] |= {"uid": "1", "annotations": wanted | {"team": "a"}}
    given = CheckpointedTrainingJob.model_validate(raw)
    manifest = build_jobset(given, number=0, failures_left=0, unreachable_s=5)
    annotations = manifest["metadata"]["annotations"]
    assert annotations.items() >= wanted.items()
    assert "team" not in annotations


def test_the_hash_changes_with_the_template_and_the_placement_and_with_nothing_else() -> None:
    same = template_hash(job())
    assert template_hash(job(totalSteps=7, suspend=True, restarts={"maxFailures": 1})) == same
    assert template_hash(job(checkpoint={"uri": "gs://b/x", "interval": {"seconds": 5}})) == same
    assert template_hash(job(placement={"hosts": {"count": 3}})) != same
    assert template_hash(job(template={"spec": {"containers": [{"name": "trainer", "image": "2"}]}})) != same


TOPOLOGY = "alpha.jobset.sigs.k8s.io/exclusive-topology"


@pytest.mark.parametrize(
    ("placement", "annotations", "label"),
    [
        (TPU, {}, "cloud.google.com/gke-nodepool"),
        (TPU, {TOPOLOGY: "rack"}, "rack"),
        (TPU, {TOPOLOGY: ""}, None),
        ({"tpu": TPU["tpu"] | {"slices": 1}}, {}, None),
        ({"tpu": TPU["tpu"] | {"slices": 1}}, {TOPOLOGY: "rack"}, "rack"),
        ({"hosts": {"count": 2}}, {}, None),
    ],
)
def test_each_slice_of_several_gets_a_node_pool_of_its_own(
    placement: dict[str, Any], annotations: dict[str, str], label: str | None
) -> None:
    given = job(placement=placement)
    meta = given.metadata.model_copy(update={"annotations": annotations})
    given = given.model_copy(update={"metadata": meta})
    manifest = build_jobset(given, number=0, failures_left=0, unreachable_s=5)
    assert manifest["metadata"]["annotations"].get(TOPOLOGY) == label


def test_defaults_that_the_api_server_adds_change_no_hash() -> None:
    def with_ports(**more: object) -> CheckpointedTrainingJob:
        trainer = {"name": "trainer", "image": "1", "ports": [{"containerPort": 1, **more}]}
        volume = {"name": "v", "configMap": {"name": ""} if more else {}}
        return job(template={"spec": {"containers": [trainer], "volumes": [volume]}})

    assert template_hash(with_ports(protocol="TCP")) == template_hash(with_ports())
    assert template_hash(with_ports(protocol="UDP")) != template_hash(with_ports())
    assert template_hash(with_ports(name="")) != template_hash(with_ports()), "not that field's default"


def test_defaults_of_the_placement_change_no_hash() -> None:
    tpu = {"accelerator": "v5e", "topology": "4x4"}
    written = tpu | {"slices": 1, "provisioning": "OnDemand"}
    assert template_hash(job(placement={"tpu": written})) == template_hash(job(placement={"tpu": tpu}))


def test_the_settings_are_what_the_runtime_reads() -> None:
    checkpoint = {
        "uri": "gs://bucket/x",
        "interval": {"steps": 5, "seconds": 60},
        "retention": {
            "last": 2,
            "everySteps": 1000,
            "best": {"metric": "loss", "mode": "Min", "count": 4},
            "maxAgeSeconds": 3600,
        },
        "onDisruption": "Skip",
    }
    manifest = build_config_map(job(checkpoint=checkpoint), OperatorSettings(), "PEM")
    settings = Settings.from_json(manifest["data"]["settings.json"])
    assert (settings.uri, settings.interval.steps, settings.interval.seconds) == ("gs://bucket/x", 5, 60)
    assert settings.retention == Retention(
        last=2,
        every_steps=1000,
        best=Best(metric="loss", mode=BestMode.MIN, count=4),
        max_age_seconds=3600,
    )
    assert (settings.on_disruption.value, settings.total_steps) == ("Skip", 1000)
    assert settings.endpoint is not None
    url = "https://stepkeeper-operator.stepkeeper-system.svc:8443/v1/namespaces/default/jobs/lm/report"
    assert settings.endpoint.url == url
    assert manifest["data"]["ca.crt"] == "PEM"
