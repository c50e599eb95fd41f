"""What is built for a cluster: the same content never twice, other content always."""

import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from stepcluster import binaries
from stepcluster.errors import BuildError, UnsupportedMachineError
from stepcluster.machine import require_root
from stepcluster.ociimage import Entry, Settings, write_image, write_layer


def test_the_key_of_a_build_is_of_its_files_flags_and_packages_alone(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        (folder / "kube").mkdir(parents=True)
        (folder / "kube" / "main.go").write_text("package main\n")
    assert binaries.content_key(one, ["-race"]) == binaries.content_key(other, ["-race"])
    keys = {binaries.content_key(one, flags, ["./x"]) for flags in ([], ["-race"])}
    keys.add(binaries.content_key(one, []))
    (one / "kube" / "main.go").rename(one / "kube" / "other.go")
    keys.add(binaries.content_key(one, []))
    (one / "kube" / "other.go").write_text("package other\n")
    keys.add(binaries.content_key(one, []))
    assert len(keys) == 5


def test_the_versions_are_those_of_go_mod() -> None:
    flags = binaries.build_flags("require (\n\tk8s.io/kubernetes v1.36.3\n)\n")
    assert "-X k8s.io/component-base/version.gitVersion=v1.36.3" in flags[1]
    assert "gitMinor=36" in flags[1]
    with pytest.raises(BuildError, match="pins no"):
        binaries.build_flags("module m\n")
    assert binaries.needed_go((binaries.SOURCE / "go.mod").read_text(encoding="utf-8")) == (1, 26)


def test_without_root_the_message_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UnsupportedMachineError, match=r"needs root.*sudo.*KUBECONFIG"):
        require_root()


def test_an_image_is_what_oci_asks_for_and_has_nothing_of_the_machine(tmp_path: Path) -> None:
    entries = [
        Entry(path="b", data=b"2", mode=0o644),
        Entry(path="a", link="b"),
        Entry(path="tmp", mode=0o1777),
    ]
    layer = write_layer(tmp_path / "one.tar", entries)
    assert layer.digest == write_layer(tmp_path / "other.tar", reversed(entries)).digest
    with tarfile.open(layer.path) as tar:
        assert {(member.uid, member.gid, member.mtime) for member in tar} == {(0, 0, 315532800)}
    settings = Settings(environment={"PATH": "/bin"}, entrypoint=["/pause"], user="65534:65534")
    write_image(tmp_path / "image.tar", "localhost/pause:1", [layer], settings)
    with tarfile.open(tmp_path / "image.tar") as tar:
        blobs = {member.name: file.read() for member in tar if (file := tar.extractfile(member))}

    def read(digest: str) -> bytes:
        blob = blobs[f"blobs/{digest.replace(':', '/')}"]
        assert digest == f"sha256:{hashlib.sha256(blob).hexdigest()}"
        return blob

    (listed,) = json.loads(blobs["index.json"])["manifests"]
    manifest = json.loads(read(listed["digest"]))
    config = json.loads(read(manifest["config"]["digest"]))
    assert listed["annotations"]["io.containerd.image.name"] == "localhost/pause:1"
    assert (
        config["config"].items()
        >= {"Entrypoint": ["/pause"], "Env": ["PATH=/bin"], "User": "65534:65534"}.items()
    )
    assert config["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]] == [layer.digest]
