"""Test the manifests: golden files for the whole, and one test for each part that must never go missing."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fake_cluster.stories import table
from fake_cluster.world import training_job
from stepkeeper.contract import Best, BestMode, EveryInterval, Identity, Interval, Retention, Settings
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.training_jobs.build.jobset import build_jobset, template_hash
from stepkeeper_operator.training_jobs.build.objects import build_config_map

GOLDEN = Path(__file__).parents[2] / "data/operator"
TPU = {"tpu": {"accelerator": "v5p", "topology": "2x2x2", "slices": 2, "provisioning": "Spot"}}

KUBEFLOW = [f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN")]


def job(*, annotations: dict[str, str] | None = None, **spec: Any) -> CheckpointedTrainingJob:
    raw = training_job(**spec)
    labels = {"kueue.x-k8s.io/queue-name": "tpus", "team": "a"}
    raw["metadata"] |= {"uid": "11111111-2222", "labels": labels, "annotations": annotations or {}}
    return CheckpointedTrainingJob.model_validate(raw)


def jobset(**given: Any) -> dict[str, Any]:
    return build_jobset(job(**given), number=3, failures_left=5, unreachable_s=30)


def env(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the trainer's variables, in their order."""
    return {variable["name"]: variable.get("value") for variable in trainer(manifest)["env"]}


def template(*, spec: dict[str, Any] | None = None, **trainer: Any) -> dict[str, Any]:
    """Make a template, with these fields of its trainer and of its spec."""
    container = {"name": "trainer", "image": "x"} | trainer
    return {"spec": {"containers": [container]} | (spec or {})}


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


PATIENT = {"terminationGracePeriodSeconds": 90}


@table(
    "given, found",
    {
        "the last word": ({}, {"STEPKEEPER_TERMINATION_FILE": "/dev/termination-log"}),
        "another place of it": (
            {"template": template(terminationMessagePath="/tmp/t")},
            {"STEPKEEPER_TERMINATION_FILE": "/tmp/t"},
        ),
        "the time at an end": ({}, {"STEPKEEPER_GRACE_S": "30"}),
        "the template's time": ({"template": template(spec=PATIENT)}, {"STEPKEEPER_GRACE_S": "90"}),
        "that of spot machines": (
            {"placement": TPU, "template": template(spec=PATIENT)},
            {"STEPKEEPER_GRACE_S": "15"},
        ),
    },
)
def test_the_runtime_is_told(given: dict[str, Any], found: dict[str, str]) -> None:
    built = jobset(**given)
    assert env(built).items() >= found.items()
    wanted = given.get("template", template())["spec"]["containers"][0]
    assert trainer(built).get("terminationMessagePath") == wanted.get("terminationMessagePath")


def test_every_container_leaves_the_end_of_its_log_unless_the_template_says_otherwise() -> None:
    inits = [{"name": "init", "image": "x"}]
    others = [{"name": "trainer", "image": "x"}, {"name": "logs", "terminationMessagePolicy": "File"}]
    built = pod_spec(jobset(template=template(spec={"initContainers": inits, "containers": others})))
    policies = [c["terminationMessagePolicy"] for c in built["initContainers"] + built["containers"]]
    assert policies == ["FallbackToLogsOnError", "FallbackToLogsOnError", "File"]


def test_what_the_template_says_of_its_own_is_kept() -> None:
    stop = {"preStop": {"exec": {"command": ["./stop"]}}}
    env = [{"name": "MINE", "value": "1"}]
    container = {"name": "trainer", "image": "x", "env": env, "lifecycle": stop}
    container |= {"resources": {"limits": {"memory": "1Gi"}}}
    sidecar = {"name": "logs", "image": "y"}
    toleration = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 5}
    spec = {"containers": [container, sidecar], "tolerations": [toleration], "nodeSelector": {"disk": "ssd"}}
    built = pod_spec(jobset(placement=TPU, template={"spec": spec}))
    trainer, logs = built["containers"]
    assert (trainer["env"][-1], trainer["lifecycle"]) == (env[0], stop)
    assert trainer["resources"]["limits"] == {"memory": "1Gi", "google.com/tpu": "4"}
    assert logs.items() >= sidecar.items()
    assert built["nodeSelector"]["disk"] == "ssd"
    assert [t for t in built["tolerations"] if t.get("key") == toleration["key"]] == [toleration]


def test_pods_stay_on_a_node_that_shuts_down_whatever_lets_them_be_scheduled() -> None:
    scheduled = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoSchedule"}
    *ours, last = pod_spec(jobset(template=template(spec={"tolerations": [scheduled]})))["tolerations"]
    seconds = {t["key"]: t["tolerationSeconds"] for t in ours}
    assert seconds == {"node.kubernetes.io/unreachable": 30, "node.kubernetes.io/not-ready": 60}
    assert {t["effect"] for t in ours} == {"NoExecute"}
    assert last == scheduled


V5E = {"accelerator": "v5e", "topology": "4x4"}


def test_the_hash_changes_with_the_template_and_the_placement_and_with_nothing_else() -> None:
    same = template_hash(job())
    assert template_hash(job(totalSteps=7, suspend=True, restarts={"maxFailures": 1})) == same
    assert template_hash(job(checkpoint={"uri": "gs://b/x", "interval": {"every": {"seconds": 5}}})) == same
    assert template_hash(job(placement={"hosts": {"count": 3}})) != same
    assert template_hash(job(template={"spec": {"containers": [{"name": "trainer", "image": "2"}]}})) != same
    written = V5E | {"slices": 1, "provisioning": "OnDemand"}
    assert template_hash(job(placement={"tpu": written})) == template_hash(job(placement={"tpu": V5E}))


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
    manifest = jobset(placement=placement, annotations=annotations)
    assert manifest["metadata"]["annotations"].get(TOPOLOGY) == label


def test_the_settings_are_what_the_runtime_reads() -> None:
    best = {"metric": "loss", "mode": "Min", "count": 4}
    kept = {"last": 2, "everySteps": 1000, "best": best, "maxAgeSeconds": 3600}
    interval = {"every": {"steps": 5, "seconds": 60}}
    checkpoint = {"uri": "gs://bucket/x", "interval": interval, "retention": kept, "onDisruption": "Skip"}
    manifest = build_config_map(job(checkpoint=checkpoint), OperatorSettings(), "PEM")
    settings = Settings.from_json(manifest["data"]["settings.json"])
    assert settings.uri == "gs://bucket/x"
    assert settings.interval == Interval(every=EveryInterval(steps=5, seconds=60))
    lowest = Best(metric="loss", mode=BestMode.MIN, count=4)
    assert settings.retention == Retention(last=2, every_steps=1000, best=lowest, max_age_seconds=3600)
    assert (settings.on_disruption.value, settings.total_steps) == ("Skip", 1000)
    assert settings.endpoint is not None
    url = "https://stepkeeper-operator.stepkeeper-system.svc:8443/v1/namespaces/default/jobs/lm/report"
    assert settings.endpoint.url == url
    assert manifest["data"]["ca.crt"] == "PEM"
    assert manifest["data"]["trainer-status-url"] == url.replace("report", "trainer-status")


def test_every_variable_of_the_identity_is_set_and_the_users_can_refer_to_them() -> None:
    names = [*env(jobset(template=template(env=[{"name": "RANK", "value": "$(STEPKEEPER_HOST_INDEX)"}])))]
    assert sorted(names[:-4]) == sorted(Identity.variables())
    assert names[-4:] == [*KUBEFLOW, "RANK"]


def test_a_variable_of_kubeflow_that_the_template_has_is_left_as_it_is() -> None:
    """The API server refuses a JobSet whose container names a variable twice."""
    own = {"name": KUBEFLOW[0], "value": "https://trainer.kubeflow/status"}
    variables = trainer(jobset(template=template(env=[own])))["env"]
    assert [each for each in variables if each["name"] in KUBEFLOW][-1] == own
    assert [each["name"] for each in variables if each["name"] in KUBEFLOW] == [*KUBEFLOW[1:], KUBEFLOW[0]]


def test_jobset_restarts_failures_twice_at_most_and_never_more_often_than_the_job_may() -> None:
    for failures_left, allowed in ((0, 0), (1, 1), (2, 2), (3, 2), (100, 2)):
        manifest = build_jobset(job(), number=0, failures_left=failures_left, unreachable_s=5)
        assert manifest["spec"]["failurePolicy"]["maxRestarts"] == allowed


def test_what_kueue_reads_goes_to_the_jobset_and_other_labels_and_annotations_do_not() -> None:
    wanted = {"provreq.kueue.x-k8s.io/maxRunDurationSeconds": "3600"}
    meta = jobset(annotations=wanted | {"team": "a"})["metadata"]
    assert meta["labels"]["kueue.x-k8s.io/queue-name"] == "tpus"
    assert meta["annotations"].items() >= wanted.items()
    assert "team" not in meta["labels"] | meta["annotations"]
