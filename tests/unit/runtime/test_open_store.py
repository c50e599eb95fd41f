"""Test roots: the URIs and paths that name a store, the errors for others, and mounts that are buckets."""

import os
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from fsspec.spec import AbstractFileSystem
from typing_extensions import override

from stepkeeper.dcp.folder import folder_uri, open_folder
from stepkeeper.errors import BadUriError, StorageError
from stepkeeper.storage import open as open_module
from stepkeeper.storage import open_store, root_uri
from stepkeeper.storage.fsspec import FsspecStore
from stepkeeper.storage.mounts import gcsfuse_uri


def test_a_folder_whose_name_is_no_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"r\xfcn")
    store = open_store(folder.as_uri())
    store.write("1/x", [b"1"])
    assert [os.fsencode(each.name) for each in tmp_path.iterdir()] == [b"r\xfcn"]
    assert open_store(store.uri).read("1/x") == b"1"
    assert open_store(f"file://{tmp_path}/grün").uri == (tmp_path / "grün").as_uri()


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("../runs", "disk/runs"),
        ("new/../../runs", "disk/runs"),
        ("{tmp}/link/../runs/a", "disk/runs/a"),
        ("{tmp}/disk/job/..", "disk"),
        ("..runs", "disk/job/..runs"),
        ("~", "home"),
        ("~/runs", "home/runs"),
        ("./~/runs", "disk/job/~/runs"),
        ("runs~", "disk/job/runs~"),
        ("$HOME/runs", "disk/job/$HOME/runs"),
        ("file://{tmp}/link/../runs", "disk/runs"),
        ("file://{tmp}/link/runs", "link/runs"),
        ("file://{tmp}/~/runs", "~/runs"),
    ],
)
def test_a_path_leads_where_open_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, folder: str
) -> None:
    job = tmp_path / "disk" / "job"
    job.mkdir(parents=True)
    (tmp_path / "link").symlink_to(job)
    monkeypatch.chdir(job)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_store(root_uri(path.format(tmp=tmp_path))).uri == (tmp_path / folder).as_uri()


def test_a_home_folder_is_that_of_the_user_that_is_named() -> None:
    assert root_uri("~root/runs") == Path("~root/runs").expanduser().as_uri()
    with pytest.raises(BadUriError, match="names no root"):
        root_uri("")
    with pytest.raises(BadUriError, match=r"'~nobody-has-this-name/runs': .* write the whole path"):
        root_uri("~nobody-has-this-name/runs")


@pytest.mark.parametrize("path", ["model.pt", "model.pt/runs/a"])
def test_a_file_is_no_root(tmp_path: Path, path: str) -> None:
    (tmp_path / "model.pt").write_bytes(b"weights")
    with pytest.raises(BadUriError, match=f"^{tmp_path}/model.pt is a file; a root is a folder"):
        open_store((tmp_path / path).as_uri())


class OnlyRead(AbstractFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """A file system that takes no objects, as those of GitHub and of archives."""

    @override
    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        raise NotImplementedError


def test_a_file_system_that_takes_no_objects_is_no_root() -> None:
    store = FsspecStore(OnlyRead(), "run", uri="any://run")
    with pytest.raises(StorageError, match=r"run/x: fsspec's OnlyRead can't do that .* A root needs a store"):
        store.write("x", [b"1"])


def test_without_fsspec_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stepkeeper.storage.fsspec", None)
    with pytest.raises(BadUriError, match=r"for s3:// install stepkeeper\[fsspec\]"):
        open_store("s3://bucket/x")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("/mnt/runs", "has no scheme; for a folder write 'file:///mnt/runs'"),
        ("", "has no scheme; for a folder write 'file:///folder'"),
        ("file://mnt/runs", "names a host .* write three slashes: 'file:///mnt/runs'"),
        ("file:///", "is 'file:///' and its absolute path"),
        ("file:///a/..", "is 'file:///' and its absolute path"),
        ("file://../runs", "write '../runs', without 'file://'"),
        ("file://~/runs", "write '~/runs', without 'file://'"),
        ("gs:///x", "names no bucket; write 'gs://bucket/prefix'"),
        ("gs://Bucket/x", "names no bucket"),
        ("gs://bucket/a//b", "leave them out"),
        ("gs://bucket/x?y=1", "no meaning in a checkpoint URI"),
        ("gcs://bucket/x", "write 'gs://bucket/x'"),
        ("s4://bucket/x", "fsspec has no file system for it: Protocol not known: s4"),
        ("lakefs://bucket/x", "fsspec has no file system for it: Please install lakefs-spec"),
        ("local:///mnt/x", "for a folder write 'file://'"),
        ("simplecache::gs://bucket/x", "a cache or an archive before the store"),
        ("sftp://me:secret@host/x", "a sftp:// URI with a password"),
        ("s3:///x", "names no bucket or host; write 's3://bucket/prefix'"),
        ("s3://bucket/a/../b", "leave out"),
        ("dir://runs/x", r"fsspec can't open a dir:// file system by this URI alone \(AttributeError"),
        (
            "github://org/repo",
            r"fsspec can't open a github:// file system by this URI alone \(TypeError.*'org'",
        ),
    ],
)
def test_what_names_no_store_is_told_what_to_write(uri: str, message: str) -> None:
    with pytest.raises(BadUriError, match=message) as refused:
        open_store(uri)
    assert "secret" not in str(refused.value)


DISK = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw"
GCSFUSE = "60 22 0:55 / /mnt/runs rw,nosuid,nodev shared:9 master:3 - fuse.gcsfuse my-bucket rw,user_id=0"
GKE = "61 22 0:56 / /data rw,nosuid,nodev - fuse my_bucket.example rw,user_id=0,group_id=0,allow_other"
NFS = "62 22 0:57 / /nfs rw,relatime - nfs4 10.0.0.2:/export rw,vers=4.2"
INSIDE = "71 60 0:60 / /mnt/runs/local rw - tmpfs tmpfs rw"
OVER = "72 60 0:61 / /mnt/runs rw - ext4 /dev/sdb rw"
BIND = "70 22 0:56 /runs/llm /work rw - fuse my_bucket.example rw"
SPACES = r"60 22 0:5 /a\040b /my\040runs\011\134x rw - fuse.gcsfuse my-bucket rw"
NO_MOUNTS = ["1 2", "22 1 0:1 / / rw ext4 d rw", "22 1 0:1 / / rw - ext4"]
ABOVE = "73 22 0:62 / /mnt rw - xfs /dev/sdc rw"


def info(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def of_fuse(kind: str, source: str) -> list[str]:
    return [DISK, f"60 22 0:5 / /m rw - {kind} {source} rw"]


@pytest.mark.parametrize(
    ("lines", "path", "uri"),
    [
        pytest.param([DISK, GCSFUSE, NFS], "/mnt/runs", "gs://my-bucket", id="a bucket"),
        pytest.param([DISK, GCSFUSE, NFS], "/mnt/runs/a/b", "gs://my-bucket/a/b", id="a folder of it"),
        pytest.param([DISK, GCSFUSE, NFS], "/mnt/runs2", None, id="another folder"),
        pytest.param([DISK, GCSFUSE, NFS], "/mnt", None, id="the folder above"),
        pytest.param([DISK, GCSFUSE, NFS], "/nfs/x", None, id="NFS"),
        pytest.param([*NO_MOUNTS, DISK, GCSFUSE], "/mnt/runs", "gs://my-bucket", id="lines without sense"),
        pytest.param([DISK, GKE], "/data/llm", "gs://my_bucket.example/llm", id="GKE's, without a subtype"),
        *(pytest.param(of_fuse("fuse", s), "/m/x", None, id=s) for s in ("/dev/fuse", "h:/p", "s3fs#b", "A")),
        pytest.param(of_fuse("fuse.juicefs", "bucket"), "/m/x", None, id="juicefs"),
        pytest.param(
            of_fuse("fuse.gcsfuse", "gcsfuse"), "/m/b-1/run", "gs://b-1/run", id="all buckets in one"
        ),
        pytest.param([DISK, GKE, BIND], "/work/a", "gs://my_bucket.example/runs/llm/a", id="a bind mount"),
        pytest.param([DISK, GCSFUSE, INSIDE], "/mnt/runs/local/x", None, id="a mount inside"),
        pytest.param([DISK, GCSFUSE, INSIDE], "/mnt/runs/b", "gs://my-bucket/b", id="beside a mount inside"),
        pytest.param([DISK, GCSFUSE, OVER], "/mnt/runs/x", None, id="a mount over it"),
        pytest.param([DISK, GCSFUSE, ABOVE], "/mnt/runs/x", None, id="a mount over the folder above"),
        pytest.param([DISK, SPACES], "/my runs\t\\x/y", "gs://my-bucket/a%20b/y", id="octal names"),
    ],
)
def test_a_bucket_is_known_by_its_mount(lines: list[str], path: str, uri: str | None) -> None:
    assert gcsfuse_uri(info(*lines), PurePosixPath(path)) == uri


def test_a_folder_on_a_mounted_bucket_is_refused_with_the_uri_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "bucket")
    line = f"60 22 0:55 / {tmp_path}/bucket rw - fuse.gcsfuse my-bucket rw"
    monkeypatch.setattr(open_module, "read_mountinfo", lambda: info(DISK, line))
    for folder in ("bucket/run", "link/run"):
        with pytest.raises(BadUriError, match="write 'gs://my-bucket/run'"):
            open_store((tmp_path / folder).as_uri())
    open_store((tmp_path / "other").as_uri())


def test_paths_and_uris_name_folders() -> None:
    assert folder_uri("/a b/c") == "file:///a%20b/c"
    assert folder_uri(Path("/a")) == "file:///a"
    assert folder_uri("a/b") == (Path.cwd() / "a/b").as_uri()
    assert folder_uri("gs://bucket/a/") == "gs://bucket/a"
    for wrong in ("", "local:///a", "gs://", Path("gs://bucket/a")):
        with pytest.raises(BadUriError):
            open_folder(wrong)
