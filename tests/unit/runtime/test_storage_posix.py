"""Test a folder as a store: what is synced, which files remain, and the errors for failures."""

import ctypes
import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stepkeeper.errors import StorageError, TransientStorageError
from stepkeeper.storage import posix, posix_files
from stepkeeper.storage.posix import PosixStore
from stepkeeper.storage.retry import Patience


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "x"


@pytest.fixture
def store(root: Path) -> PosixStore:
    return PosixStore(root)


def fail(monkeypatch: pytest.MonkeyPatch, function: str, number: int) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, function, failing)


@contextmanager
def below_a_hidden_folder() -> Iterator[Path]:
    """Yield a root in a folder that this user, who isn't root, may write to and enter, but not list."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        outer, hidden = Path(name), Path(name) / "hidden"
        hidden.mkdir()
        outer.chmod(0o755)
        try:
            if user == 0:
                os.chown(hidden, 65534, -1)
                os.seteuid(65534)
            hidden.chmod(0o311)
            yield hidden / "alice"
        finally:
            os.seteuid(user)
            hidden.chmod(0o755)


def test_a_root_below_a_folder_that_may_not_be_listed_works(monkeypatch: pytest.MonkeyPatch) -> None:
    sync, all_synced = posix_files.sync_file_system, []

    def recorded(folder: Path) -> None:
        all_synced.append(folder.name)
        sync(folder)

    for module in (posix, posix_files):
        monkeypatch.setattr(module, "sync_file_system", recorded)
    with below_a_hidden_folder() as root:
        for run in (root, root / "run"):
            store = PosixStore(run)
            assert store.put_if_absent("log/0.json", b"x")
            assert store.put_if_absent("log/1.json", b"x")
            assert not store.put_if_absent("log/1.json", b"y")
            assert [stat.path for stat in store.list("")][:2] == ["log/0.json", "log/1.json"]
    assert all_synced == ["alice", "alice"], (
        "when the root is made, and by whoever puts first; not at each put"
    )


def test_a_folder_that_refuses_is_named() -> None:
    with below_a_hidden_folder() as root:
        root.mkdir()
        root.chmod(0o111)
        with pytest.raises(StorageError, match=r"alice/run/log/.*: Permission denied \(.*/alice/run\)"):
            PosixStore(root / "run").put_if_absent("log/0.json", b"x")
        root.chmod(0o755)


def test_what_another_host_has_just_made_is_looked_for_at_the_server(
    store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client answers from its cache of names and listings, until it has to ask again."""
    (root / "log").mkdir(parents=True)
    asked: list[Path] = []

    def shown(folder: Path) -> None:
        asked.append(folder)
        (folder / f"{len(asked)}.json").write_bytes(b"x")

    monkeypatch.setattr(posix, "refresh_folder", shown)
    assert store.read("log/1.json") == b"x"
    assert [stat.path for stat in store.list("log/")] == ["log/1.json", "log/2.json"]
    assert asked == [root / "log"] * 2


def test_a_failure_after_the_link_is_an_unknown_outcome_whatever_it_is(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_if_absent("log/first", b"x")
    fsync = os.fsync
    synced: list[int] = []

    def second_fails(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, "no space")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(TransientStorageError, match="no space"):
        store.put_if_absent("log/0.json", b"x")
    assert not store.put_if_absent("log/0.json", b"x")
    assert store.read("log/0.json") == b"x"


@pytest.mark.parametrize(
    ("function", "number", "kind", "n_bytes"),
    [
        ("writev", errno.ENOSPC, StorageError, 3),
        ("writev", errno.ENOSPC, StorageError, 3 << 20),
        ("writev", errno.EIO, TransientStorageError, 3),
        ("fsync", errno.EDQUOT, StorageError, 3),
    ],
)
def test_a_write_that_failed_left_nothing_and_can_be_done_again(
    store: PosixStore,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    number: int,
    kind: type[Exception],
    n_bytes: int,
) -> None:
    with monkeypatch.context() as broken:
        fail(broken, function, number)
        with pytest.raises(kind, match="1/0-a/x") as raised:
            store.write("1/0-a/x", [b"a" * n_bytes])
        assert isinstance(raised.value, TransientStorageError) == (kind is TransientStorageError)
        assert store.list("") == []
    store.write("1/0-a/x", [b"a" * n_bytes])
    assert store.read("1/0-a/x") == b"a" * n_bytes


def test_a_folder_that_may_not_be_entered_is_no_empty_one_but_where_it_is_met_on_the_way(
    store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("1/x", [b"x"])
    (root / "lost+found").mkdir()
    scandir = os.scandir

    def guarded(folder: Path) -> Iterator[os.DirEntry[str]]:
        if folder == root / "lost+found":
            raise PermissionError(errno.EACCES, "not allowed")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", guarded)
    assert [stat.path for stat in store.list("")] == ["1/x"]
    with pytest.raises(StorageError, match="not allowed"):
        store.list("lost+found/")


def test_folders_that_a_deletion_empties_go_and_the_root_stays(store: PosixStore, root: Path) -> None:
    for name in "xyz":
        store.write(f"1/0-a/{name}", [b"x"])
    store.delete("1/0-a/x")
    assert (root / "1" / "0-a").is_dir()
    (root / "1/0-a/y").rename(root / "1/0-a/.nfs000000000012d687000000a1")
    for name in "yz":
        store.delete(f"1/0-a/{name}")
    assert store.list("") == [], "what NFS keeps of a deleted file is no object"
    (root / "1/0-a/.nfs000000000012d687000000a1").unlink()
    store.write("1/0-a/x", [b"x"])
    store.delete("1/0-a/x")
    assert root.is_dir()
    assert not any(root.iterdir())


class OldLibrary:
    """A C library, or a kernel, that can't rename without replacing."""

    def __init__(self, number: int | None) -> None:
        if number is not None:
            self.renameat2 = lambda *_: ctypes.set_errno(number) or -1


NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)
REFUSED = r"can neither link files nor .* put the root on another file system"


@pytest.mark.parametrize(
    ("link", "rename", "error", "says"),
    [
        *((number, 0, None, "") for number in NO_LINKS),
        *(
            (errno.EPERM, each, StorageError, REFUSED)
            for each in (None, errno.EINVAL, errno.ENOSYS, errno.EPERM)
        ),
        (errno.EPERM, errno.EIO, TransientStorageError, r"log/0\.json"),
        (errno.EIO, 0, TransientStorageError, r"log/0\.json"),
        (errno.ESTALE, 0, TransientStorageError, r"log/0\.json"),
    ],
)
def test_without_links_a_name_is_taken_by_a_rename_that_replaces_nothing_or_not_at_all(
    store: PosixStore,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    link: int,
    rename: int | None,
    error: type[Exception] | None,
    says: str,
) -> None:
    fail(monkeypatch, "link", link)
    if rename != 0:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: OldLibrary(rename))
    if error:
        with pytest.raises(error, match=says) as raised:
            store.put_if_absent("log/0.json", b"x")
        assert type(raised.value) is error
        assert store.list("") == []
        return
    assert store.put_if_absent("log/0.json", b"x")
    assert not store.put_if_absent("log/0.json", b"y")
    assert store.read("log/0.json") == b"x"
    assert [path.name for path in (root / "log").iterdir()] == ["0.json"]


def test_parts_go_in_however_few_a_call_takes(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [bytes([number % 251]) for number in range(3000)]
    store.write("x", many)
    assert store.read("x") == b"".join(many)
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: os.write(descriptor, parts[0][:3]))
    store.write("y", [b"0123456789", b"", memoryview(b"abcdefg")])
    assert store.read("y") == b"0123456789abcdefg"
    with pytest.raises(StorageError, match="x/1"):
        store.write("x/1", [b"in a file"])


@pytest.mark.parametrize("how", ["put_if_absent", "write"])
def test_a_root_that_takes_no_folders_is_no_passing_fault(how: str) -> None:
    store = PosixStore(Path("/proc/stepkeeper-root"))
    with pytest.raises(
        StorageError, match=r"no folder can be created in /proc, although it exists"
    ) as raised:
        store.put_if_absent("a/b", b"") if how == "put_if_absent" else store.write("a/b", [b""])
    assert not isinstance(raised.value, TransientStorageError)


@pytest.mark.parametrize("taken", ["before it is there", "once it is there"])
def test_a_folder_that_a_deletion_takes_away_is_made_again(
    store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    """A step is saved again while the last of its earlier data is deleted."""
    make, left = Path.mkdir, [taken]

    def lose(folder: Path, *arguments: Any, **options: Any) -> None:
        if folder == root / "20" and left == ["before it is there"]:
            raise FileNotFoundError(errno.ENOENT, left.pop(), str(folder))
        make(folder, *arguments, **options)
        if folder == root / "20" and left:
            left.pop()
            folder.rmdir()

    root.mkdir(parents=True)
    monkeypatch.setattr(Path, "mkdir", lose)
    patience = Patience(total_s=0 if taken.startswith("before") else 90, sleep=lambda _: None)
    patience.retry(lambda: store.write("20/4-new/__0_0.distcp", [b"data"]))
    assert not left
    assert store.read("20/4-new/__0_0.distcp") == b"data"
