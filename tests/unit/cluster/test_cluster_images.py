"""Image archives: what OCI's image specification asks for, and the same bytes for the same content."""

import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from stepcluster import ociimage
from stepcluster.ociimage import Entry, Settings, tree, write_image, write_layer
from stepcluster.rootfs import library_entries, parse_ldd

SETTINGS = Settings(environment={"PATH": "/bin"}, entrypoint=["/pause"], user="65534:65534")


def test_an_archive_holds_together(tmp_path: Path) -> None:
    layer = write_layer(tmp_path / "layer.tar", [Entry(path="pause", data=b"program"), Entry(path="etc")])
    write_image(tmp_path / "image.tar", "localhost/pause:1", [layer], SETTINGS)
    with tarfile.open(tmp_path / "image.tar") as tar:
        blobs = {member.name: file.read() for member in tar if (file := tar.extractfile(member))}
    index = json.loads(blobs["index.json"])
    manifest = json.loads(blobs[blob(index["manifests"][0]["digest"])])
    config = json.loads(blobs[blob(manifest["config"]["digest"])])
    assert index["manifests"][0]["annotations"]["io.containerd.image.name"] == "localhost/pause:1"
    assert config["config"]["Entrypoint"] == ["/pause"]
    assert config["config"]["Env"] == ["PATH=/bin"]
    assert config["config"]["User"] == "65534:65534"
    assert config["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]] == [layer.digest]
    for name, content in blobs.items():
        if name.startswith("blobs/"):
            assert name == blob(f"sha256:{hashlib.sha256(content).hexdigest()}")


def blob(digest: str) -> str:
    return digest.replace(":", "/", 1).replace("sha256/", "blobs/sha256/")


def test_layers_have_owner_time_and_order_of_no_machine(tmp_path: Path) -> None:
    entries = [
        Entry(path="b", data=b"2", mode=0o644),
        Entry(path="a", link="b"),
        Entry(path="tmp", mode=0o1777),
    ]
    one = write_layer(tmp_path / "one.tar", entries)
    other = write_layer(tmp_path / "other.tar", reversed(entries))
    assert one.digest == other.digest
    with tarfile.open(one.path) as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == ["a", "b", "tmp"]
    assert {(member.uid, member.gid, member.mtime) for member in members} == {(0, 0, 315532800)}
    assert members[0].issym()
    assert members[2].mode == 0o1777


def test_a_tree_keeps_modes_and_links_and_leaves_caches_out(tmp_path: Path) -> None:
    (tmp_path / "package" / "__pycache__").mkdir(parents=True)
    (tmp_path / "package" / "__pycache__" / "m.pyc").touch()
    (tmp_path / "package" / "m.py").touch(mode=0o600)
    (tmp_path / "run").touch(mode=0o700)
    (tmp_path / "link").symlink_to("run")
    found = {entry.path: entry for entry in tree(tmp_path, "opt/app")}
    assert set(found) == {"opt/app", "opt/app/package", "opt/app/package/m.py", "opt/app/run", "opt/app/link"}
    assert found["opt/app/package/m.py"].mode == 0o644
    assert found["opt/app/run"].mode == 0o755
    assert found["opt/app/link"].link == "run"


def test_libraries_go_where_the_image_s_linker_looks(tmp_path: Path) -> None:
    text = (
        "\tlinux-vdso.so.1 (0x00007ffc)\n"
        "\tlibpython3.11.so.1.0 => /opt/py/lib/libpython3.11.so.1.0 (0x00007f01)\n"
        "\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f02)\n"
        "\tlibgone.so => not found\n"
        "\t/lib64/ld-linux-x86-64.so.2 (0x00007f03)\n"
    )
    libraries = parse_ldd(text)
    assert {path.name for path in libraries} == {"libpython3.11.so.1.0", "libc.so.6", "ld-linux-x86-64.so.2"}
    paths = {entry.path for entry in library_entries(libraries) if entry.source}
    assert paths == {
        "usr/lib/x86_64-linux-gnu/libpython3.11.so.1.0",
        "usr/lib/x86_64-linux-gnu/libc.so.6",
        "usr/lib64/ld-linux-x86-64.so.2",
    }


@pytest.mark.parametrize(
    ("name", "looked_up"),
    [
        ("localhost/stepkeeper-trainer:dev", "localhost/stepkeeper-trainer:dev"),
        ("registry:5000/a/b:1", "registry:5000/a/b:1"),
        ("europe-docker.pkg.dev/p/r/i:1", "europe-docker.pkg.dev/p/r/i:1"),
        ("my-registry/my-trainer:1", "docker.io/my-registry/my-trainer:1"),
        ("busybox:1", "docker.io/library/busybox:1"),
    ],
)
def test_an_image_has_the_name_that_a_node_looks_up(name: str, looked_up: str) -> None:
    assert ociimage.full_name(name) == looked_up
