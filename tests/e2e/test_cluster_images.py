"""Test that a pod runs the wheel, with what its image promises and nothing else."""

import json
import sys
from pathlib import Path

import pytest

from stepcluster.api import TORCH_HOST_PATH, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

TELL = """
import importlib.util, json, os, sys, sysconfig
def where(name):
    found = importlib.util.find_spec(name)
    return found and found.origin
def writable(path):
    try:
        open(path, "w").close()
    except OSError:
        return False
    return True
print(json.dumps({
    "user": [os.getuid(), os.getgid()],
    "version": list(sys.version_info[:2]),
    "modules": {name: where(name) for name in NAMES},
    "root_is_writable": writable("/file"),
    "source_of_json": where("json.decoder"),
    "has_bytecode": os.path.exists(importlib.util.cache_from_source(where("json.decoder"))),
}))
"""
READ_ONLY = {
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


def told_by(cluster: Cluster, name: str, image: str, modules: list[str], **pod: object) -> dict[str, object]:
    """Return what Python in the image reports of itself."""
    script = TELL.replace("NAMES", repr(modules))
    mounts = [{"name": "torch", "mountPath": "/opt/torch", "readOnly": True}] if "volumes" in pod else []
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["python", "-c", script],
        "securityContext": READ_ONLY,
        "volumeMounts": mounts,
    }
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": [container], **pod},
    }
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(manifest))
    cluster.kubectl("wait", f"pod/{name}", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=110s")
    told: dict[str, object] = json.loads(cluster.kubectl("logs", name))
    cluster.kubectl("delete", "pod", name, "--now")
    return told


def test_the_operator_s_image_holds_the_wheel_and_no_torch(cluster: Cluster) -> None:
    image = cluster.load_operator_image(tag="images-test")
    told = told_by(
        cluster,
        "operator-image",
        image,
        ["stepkeeper_operator", "stepkeeper", "kopf", "torch", "numpy"],
        securityContext={"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    )
    assert told["user"] == [65532, 65532]
    assert told["version"] == list(sys.version_info[:2])
    assert told["root_is_writable"] is False
    assert told["modules"] == {
        "stepkeeper_operator": "/opt/stepkeeper/stepkeeper_operator/__init__.py",
        "stepkeeper": "/opt/stepkeeper/stepkeeper/__init__.py",
        "kopf": "/opt/packages/kopf/__init__.py",
        "torch": None,
        "numpy": None,
    }


def test_a_trainer_s_image_holds_the_wheel_and_finds_torch_on_the_node(
    cluster: Cluster, tmp_path: Path
) -> None:
    app = tmp_path / "my_app"
    app.mkdir()
    (app / "__main__.py").write_text("print('hello')\n")
    image = cluster.load_trainer_image(app, tag="images-test")
    told = told_by(
        cluster,
        "trainer-image",
        image,
        ["my_app", "stepkeeper", "stepkeeper_planners", "torch"],
        tolerations=[{"operator": "Exists"}],
        nodeSelector={"cloud.google.com/gke-spot": "true"},
        volumes=[{"name": "torch", "hostPath": {"path": TORCH_HOST_PATH, "type": "Directory"}}],
    )
    assert told["modules"] == {
        "my_app": None,
        "stepkeeper": "/opt/stepkeeper/stepkeeper/__init__.py",
        "stepkeeper_planners": "/opt/stepkeeper/stepkeeper_planners/__init__.py",
        "torch": "/opt/torch/torch/__init__.py",
    }
    version = ".".join(map(str, sys.version_info[:2]))
    assert told["source_of_json"] == f"/usr/local/lib/python{version}/json/decoder.py"
    assert told["has_bytecode"] is True
