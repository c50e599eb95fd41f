"""URIs: what names a store, and what is said about the rest."""

import os
import random
import sys
from pathlib import Path

import pytest

from stepkeeper.errors import BadUriError
from stepkeeper.storage import open_store
from stepkeeper.storage.gcs import GcsStore
from stepkeeper.storage.retry import Patience


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


def test_memory_of_one_name_is_shared() -> None:
    open_store("memory://one").write("x", [b"1"])
    assert open_store("memory://one/").read("x") == b"1"
    assert open_store("memory://two").list("") == []


def test_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    store = open_store("gs://bucket/runs/x/")
    assert isinstance(store, GcsStore)
    assert store.uri == "gs://bucket/runs/x"
    store.close()


def test_a_password_in_a_uri_is_not_repeated() -> None:
    with pytest.raises(BadUriError) as refused:
        open_store("sftp://me:secret@host/x")
    assert "secret" not in str(refused.value)


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
        ("file:///a/../b", "without '..'"),
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
    ],
)
def test_what_names_no_store_is_told_what_to_write(uri: str, message: str) -> None:
    with pytest.raises(BadUriError, match=message):
        open_store(uri)


def test_asking_a_store_draws_no_random_numbers_of_the_training() -> None:
    before = random.getstate()
    assert Patience(total_s=1.0).retry(lambda: 7) == 7
    assert list(Patience(total_s=1.0).pauses_s())
    assert random.getstate() == before
