"""URIs: what names a store, and what is said about the rest."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from fsspec.spec import AbstractFileSystem
from typing_extensions import override

from stepkeeper.errors import BadUriError, StorageError
from stepkeeper.storage import open_store, root_uri
from stepkeeper.storage.fsspec import FsspecStore


def test_a_folder(tmp_path: Path) -> None:
    store = open_store(f"{tmp_path.as_uri()}/my%20run/")
    store.write("1/x", [b"1"])
    assert (tmp_path / "my run" / "1" / "x").read_bytes() == b"1"
    assert store.uri == f"{tmp_path.as_uri()}/my%20run"


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
    """Takes no objects, as those of GitHub and of archives."""

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
        ("hf://bucket/x", "fsspec has no file system for it: Install huggingface_hub"),
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
