"""The startup scripts of examples/queued_resource, against a metadata server, with stand-ins for what they call."""

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
JOINED = {**LABELS, "stepkeeper.dev/cloud-node": "ml-v5e-1"}
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
        """Return what a stand-in was called with."""
        path = self.folder / program
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def stand_in(self, program: str, body: str) -> None:
        """Put a stand-in in a program's place."""
        path = self.folder / "bin" / program
        path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        path.chmod(0o700)

    def fail_once(self, program: str, body: str) -> None:
        """Let a stand-in fail when it is called for the first time."""
        self.stand_in(
            program, f"[ -e $OUT/{program}.failed ] || {{ touch $OUT/{program}.failed; exit 1; }}\n{body}"
        )

    def run(self, script: str, settings: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run the script with its settings changed."""
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
    for name, body in STAND_INS.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        program.chmod(0o700)
    (tmp_path / "etc").mkdir()
    metadata = tmp_path / "metadata.json"
    metadata.write_text(json.dumps(METADATA), encoding="utf-8")
    with MetadataServer(("127.0.0.1", 0), metadata) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Machine(folder=tmp_path, server=server)
        server.shutdown()
        thread.join()


KUBEADM = {"API_SERVER": "10.0.0.2:6443", "CA_CERT_HASH": "sha256:ab12", "TOKEN": "abcdef.0123456789abcdef"}
K3S = {"SERVER": "https://10.0.0.2:6443", "TOKEN": "K10ab::token"}


def parse_labels(text: str) -> dict[str, str]:
    return dict(label.split("=", 1) for label in text.split(","))


def test_kubeadm_joins_with_the_operators_labels_and_the_cloud_nodes_id(machine: Machine) -> None:
    done = machine.run("join-kubeadm.sh", KUBEADM)
    assert done.returncode == 0, done.stderr
    joined = yaml.safe_load(machine.told("join.yaml"))
    token = joined["discovery"]["bootstrapToken"]
    assert token == {
        "apiServerEndpoint": "10.0.0.2:6443",
        "token": "abcdef.0123456789abcdef",
        "caCertHashes": ["sha256:ab12"],
    }
    (argument,) = joined["nodeRegistration"]["kubeletExtraArgs"]
    assert argument["name"] == "node-labels"
    assert parse_labels(argument["value"]) == JOINED
    assert not (machine.etc / "kubernetes" / "join.yaml").exists(), "it holds the token"


def test_kubeadm_gives_a_training_the_five_minutes_of_autocheckpoint(machine: Machine) -> None:
    machine.run("join-kubeadm.sh", KUBEADM)
    patches = Path(yaml.safe_load(machine.told("join.yaml"))["patches"]["directory"])
    patch = yaml.safe_load((patches / "kubeletconfiguration+merge.yaml").read_text(encoding="utf-8"))
    assert seconds(patch["shutdownGracePeriod"]) - seconds(patch["shutdownGracePeriodCriticalPods"]) == 300


def test_kubeadm_lets_containerd_serve_the_kubelet(machine: Machine) -> None:
    machine.run("join-kubeadm.sh", KUBEADM)
    assert "SystemdCgroup = true" in (machine.etc / "containerd" / "config.toml").read_text(encoding="utf-8")
    assert machine.told("systemctl") == "restart containerd\n"


def test_k3s_joins_with_the_operators_labels_and_the_cloud_nodes_id(machine: Machine) -> None:
    done = machine.run("join-k3s.sh", K3S)
    assert done.returncode == 0, done.stderr
    path = machine.etc / "rancher" / "k3s" / "config.yaml"
    configuration = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert parse_labels(",".join(configuration["node-label"])) == JOINED
    assert (configuration["server"], configuration["token"]) == ("https://10.0.0.2:6443", "K10ab::token")
    assert path.stat().st_mode & 0o077 == 0, "it holds the token"
    (argument,) = configuration["kubelet-arg"]
    kubelet = yaml.safe_load(Path(argument.removeprefix("config=")).read_text(encoding="utf-8"))
    assert (
        seconds(kubelet["shutdownGracePeriod"]) - seconds(kubelet["shutdownGracePeriodCriticalPods"]) == 300
    )
    assert machine.told("systemctl") == "daemon-reload\nenable --now k3s-agent\n"


@pytest.mark.parametrize(("script", "settings"), [("join-kubeadm.sh", KUBEADM), ("join-k3s.sh", K3S)])
class TestBoth:
    def test_the_taint_keeps_other_pods_away(
        self, machine: Machine, script: str, settings: Mapping[str, str]
    ) -> None:
        machine.run(script, settings)
        written = machine.told("join.yaml") or (machine.etc / "rancher/k3s/config.yaml").read_text()
        values = yaml.safe_load(written)
        taints = values.get("node-taint") or values["nodeRegistration"]["taints"]
        assert taints in (
            ["google.com/tpu=present:NoSchedule"],
            [{"key": "google.com/tpu", "value": "present", "effect": "NoSchedule"}],
        )

    def test_the_token_can_come_from_secret_manager(
        self, machine: Machine, script: str, settings: Mapping[str, str]
    ) -> None:
        machine.run(script, {**settings, "TOKEN": "", "TOKEN_SECRET": "projects/p/secrets/join"})
        written = machine.told("join.yaml") or (machine.etc / "rancher/k3s/config.yaml").read_text()
        assert 'token: "latest of projects/p/secrets/join"\n' in written

    def test_a_machine_without_the_operators_labels_does_not_join(
        self, machine: Machine, script: str, settings: Mapping[str, str]
    ) -> None:
        (machine.folder / "metadata.json").write_text('{"instance-id": "ml-v5e-1"}', encoding="utf-8")
        done = machine.run(script, settings)
        assert done.returncode != 0
        assert "404" in done.stderr
        assert machine.told("kubeadm") == machine.told("systemctl") == ""

    def test_a_secret_that_can_not_be_read_at_once_is_read_again(
        self, machine: Machine, script: str, settings: Mapping[str, str]
    ) -> None:
        machine.fail_once("gcloud", STAND_INS["gcloud"])
        done = machine.run(script, {**settings, "TOKEN": "", "TOKEN_SECRET": "projects/p/secrets/join"})
        assert done.returncode == 0, done.stderr
        written = machine.told("join.yaml") or (machine.etc / "rancher/k3s/config.yaml").read_text()
        assert 'token: "latest of projects/p/secrets/join"\n' in written

    def test_a_machine_that_has_joined_is_left_alone(
        self, machine: Machine, script: str, settings: Mapping[str, str]
    ) -> None:
        (machine.etc / "kubernetes").mkdir()
        (machine.etc / "kubernetes" / "kubelet.conf").touch()
        wanted = machine.etc / "systemd/system/multi-user.target.wants"
        wanted.mkdir(parents=True)
        (wanted / "k3s-agent.service").symlink_to("../k3s-agent.service")
        done = machine.run(script, settings)
        assert (done.returncode, machine.told("kubeadm"), machine.told("systemctl")) == (0, "", "")
        assert "joined already" in done.stdout


def test_a_join_that_was_cut_off_is_undone_first(machine: Machine) -> None:
    path = machine.etc / "kubernetes" / "bootstrap-kubelet.conf"
    path.parent.mkdir()
    path.touch()
    machine.run("join-kubeadm.sh", KUBEADM)
    assert [line.split()[0] for line in machine.told("kubeadm").splitlines()] == ["reset", "join"]


def test_a_join_that_fails_is_undone_and_tried_again(machine: Machine) -> None:
    conf = machine.etc / "kubernetes" / "bootstrap-kubelet.conf"
    conf.parent.mkdir()
    count = f'echo "$@" >> $OUT/kubeadm; [ $1 != join ] || [ -e {conf} ] || {{ touch {conf}; exit 1; }}'
    machine.stand_in("kubeadm", count)
    done = machine.run("join-kubeadm.sh", KUBEADM)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in machine.told("kubeadm").splitlines()] == ["join", "reset", "join"]
    assert "tried again in 10 s" in done.stderr


def test_a_join_that_never_succeeds_ends_with_its_error(machine: Machine) -> None:
    machine.stand_in("kubeadm", 'echo "$@" >> $OUT/kubeadm; exit 3')
    assert machine.run("join-kubeadm.sh", KUBEADM).returncode == 3
    assert len(machine.told("kubeadm").splitlines()) == 7
    assert machine.told("sleep").split() == ["10", "20", "40", "80", "160", "300"]


def test_an_agent_whose_unit_was_written_and_not_enabled_is_enabled(machine: Machine) -> None:
    unit = machine.etc / "systemd/system/k3s-agent.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    done = machine.run("join-k3s.sh", K3S)
    assert done.returncode == 0, done.stderr
    assert machine.told("systemctl") == "daemon-reload\nenable --now k3s-agent\n"


def test_what_the_image_lacks_is_installed_at_the_clusters_version(machine: Machine) -> None:
    (machine.folder / "bin" / "kubelet").unlink()
    (machine.folder / "bin" / "apt-get").write_text(
        '#!/bin/sh\necho "$@" >> $OUT/apt-get\n', encoding="utf-8"
    )
    for name in ("gpg", "apt-mark"):
        program = machine.folder / "bin" / name
        program.write_text("#!/bin/sh\ncat > /dev/null || true\n", encoding="utf-8")
        program.chmod(0o700)
    curl = machine.folder / "bin" / "curl"
    curl.write_text(
        '#!/bin/sh\ncase "$*" in *pkgs.k8s.io*) echo "$@" >> $OUT/curl ;; *) exec /usr/bin/curl "$@" ;; esac\n',
        encoding="utf-8",
    )
    curl.chmod(0o700)
    (machine.etc / "apt" / "sources.list.d").mkdir(parents=True)
    done = machine.run("join-kubeadm.sh", {**KUBEADM, "KUBERNETES_VERSION": "1.36.3"})
    assert done.returncode == 0, done.stderr
    assert "https://pkgs.k8s.io/core:/stable:/v1.36/deb/Release.key" in machine.told("curl")
    assert machine.told("apt-get").splitlines()[-1].endswith("kubelet=1.36.3-* kubeadm=1.36.3-*")


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))
