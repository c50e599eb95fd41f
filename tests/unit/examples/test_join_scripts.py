"""The startup scripts of examples/queued_resource, with stand-ins for what they call; one also joins end to end."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from stepcluster.vms.metadata import MetadataServer

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "examples" / "queued_resource"
LABELS = {
    "stepkeeper.dev/queued-resource-uid": "5c1f",
    "stepkeeper.dev/queued-resource": "v5e",
    "stepkeeper.dev/queued-resource-namespace": "ml",
}
METADATA = {
    "stepkeeper-node-labels": ",".join(f"{key}={value}" for key, value in LABELS.items()),
    "instance-id": "ml-v5e-1",
}
JOINED = {**LABELS, "stepkeeper.dev/slice": "ml-v5e-1"}
STAND_INS = {
    "apt-get": "exit 1",
    "containerd": "echo '            SystemdCgroup = false'",
    "gcloud": 'echo "$4 of ${5#--secret=}"',
    "k3s": "exit 1",
    "kubeadm": 'echo "$@" >> $OUT/kubeadm; [ $1 != join ] || cp $3 $OUT/join.yaml',
    "kubelet": "exit 1",
    "modprobe": "",
    "sleep": 'echo "$@" >> $OUT/sleep',
    "sysctl": "",
    "systemctl": 'echo "$@" >> $OUT/systemctl',
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine for a script: its own /etc, programs and metadata."""

    folder: Path
    server: MetadataServer

    @property
    def etc(self) -> Path:
        return self.folder / "etc"

    def told(self, program: str) -> str:
        path = self.folder / program
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def stand_in(self, program: str, body: str) -> None:
        path = self.folder / "bin" / program
        path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        path.chmod(0o700)

    def run(self, script: str, settings: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        text = (SCRIPTS / script).read_text(encoding="utf-8")
        for name, value in settings.items():
            line = next(line for line in text.splitlines() if line.startswith(f"{name}="))
            text = text.replace(f"\n{line}\n", f"\n{name}={value}\n")
        path = self.folder / "startup-script"
        path.write_text(text, encoding="utf-8")
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "OUT": str(self.folder),
            "JOIN_ETC": str(self.etc),
            "GCE_METADATA_HOST": self.server.address,
        }
        return subprocess.run(
            ["bash", str(path)], env=environment, capture_output=True, text=True, timeout=60, check=False
        )


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "etc").mkdir()
    metadata = tmp_path / "metadata.json"
    metadata.write_text(json.dumps(METADATA), encoding="utf-8")
    with MetadataServer(("127.0.0.1", 0), metadata) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        machine = Machine(folder=tmp_path, server=server)
        for name, body in STAND_INS.items():
            machine.stand_in(name, body)
        yield machine
        server.shutdown()
        thread.join()


KUBEADM = {"API_SERVER": "10.0.0.2:6443", "CA_CERT_HASH": "sha256:ab12", "TOKEN": "abcdef.0123456789abcdef"}
K3S = {"SERVER": "https://10.0.0.2:6443", "TOKEN": "K10ab::token"}


def read_k3s(machine: Machine) -> dict[str, object]:
    path = machine.etc / "rancher" / "k3s" / "config.yaml"
    assert path.stat().st_mode & 0o077 == 0, "it holds the token"
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    kubelet = yaml.safe_load(
        Path(written["kubelet-arg"][0].removeprefix("config=")).read_text(encoding="utf-8")
    )
    return {
        "labels": dict(label.split("=", 1) for label in written["node-label"]),
        "taints": written["node-taint"],
        "server": written["server"].removeprefix("https://"),
        "token": written["token"],
        "shutdown": (kubelet["shutdownGracePeriod"], kubelet["shutdownGracePeriodCriticalPods"]),
    }


def test_a_machine_joins_with_the_operators_labels_and_the_cloud_nodes_id(machine: Machine) -> None:
    done = machine.run("join-k3s.sh", K3S)
    assert done.returncode == 0, done.stderr
    assert read_k3s(machine) == {
        "labels": JOINED,
        "taints": ["google.com/tpu=present:NoSchedule"],
        "server": "10.0.0.2:6443",
        "token": K3S["TOKEN"],
        "shutdown": ("330s", "30s"),
    }
    assert machine.told("systemctl") == "daemon-reload\nenable --now k3s-agent\n"


def test_the_token_can_come_from_secret_manager_which_is_asked_again_if_it_fails(machine: Machine) -> None:
    fail_once = "[ -e $OUT/asked ] || { touch $OUT/asked; exit 1; }; "
    machine.stand_in("gcloud", fail_once + STAND_INS["gcloud"])
    settings = {**K3S, "TOKEN": "", "TOKEN_SECRET": "projects/p/secrets/join"}
    done = machine.run("join-k3s.sh", settings)
    assert done.returncode == 0, done.stderr
    assert read_k3s(machine)["token"] == "latest of projects/p/secrets/join"


def test_a_machine_without_the_operators_labels_does_not_join(machine: Machine) -> None:
    (machine.folder / "metadata.json").write_text('{"instance-id": "ml-v5e-1"}', encoding="utf-8")
    done = machine.run("join-k3s.sh", K3S)
    assert done.returncode != 0
    assert "404" in done.stderr
    assert machine.told("systemctl") == ""


def test_a_machine_that_has_joined_is_left_alone(machine: Machine) -> None:
    wanted = machine.etc / "systemd/system/multi-user.target.wants"
    wanted.mkdir(parents=True)
    (wanted / "k3s-agent.service").symlink_to("../k3s-agent.service")
    done = machine.run("join-k3s.sh", K3S)
    assert (done.returncode, machine.told("systemctl")) == (0, "")
    assert "joined already" in done.stdout


def test_a_join_that_fails_is_undone_and_tried_again(machine: Machine) -> None:
    conf = machine.etc / "kubernetes" / "bootstrap-kubelet.conf"
    conf.parent.mkdir()
    count = f'echo "$@" >> $OUT/kubeadm; [ $1 != join ] || [ -e {conf} ] || {{ touch {conf}; exit 1; }}'
    machine.stand_in("kubeadm", count)
    done = machine.run("join-kubeadm.sh", KUBEADM)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in machine.told("kubeadm").splitlines()] == ["join", "reset", "join"]
    assert "tried again in 10 s" in done.stderr
