"""A folder as a store: what is synced, what is left behind, and what failures mean."""

import ctypes
import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stepkeeper.errors import StorageError, TransientStorageError
from stepkeeper.storage import posix, posix_files
from stepkeeper.storage.base import UnfinishedPut
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


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files and folders in the order in which they were synced, and links."""
    found: list[str] = []
    fsync, link = os.fsync, os.link

    def recorded_fsync(descriptor: int) -> None:
        found.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def recorded_link(source: Path, target: Path) -> None:
        found.append(f"link {target}")
        link(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "link", recorded_link)
    return found


def test_a_put_is_synced_before_it_has_its_name_and_its_folders_after(
    store: PosixStore, root: Path, synced: list[str]
) -> None:
    store.put_if_absent("log/0.json", b"x")
    made = [root.parent.parent, root.parent, root]
    assert synced[:3] == [str(folder) for folder in made]
    assert Path(synced[3]).parent == root / "log"
    assert Path(synced[3]).name.startswith(".tmp-")
    assert synced[4:8] == [f"link {root}/log/0.json", f"{root}/log", str(root), str(root.parent)]


def test_folders_above_the_root_are_synced_once_whoever_made_them(
    store: PosixStore, root: Path, synced: list[str]
) -> None:
    root.mkdir(parents=True)
    store.put_if_absent("log/0.json", b"x")
    assert str(root.parent.parent) in synced
    assert str(root.parent.parent.parent) in synced
    synced.clear()
    store.put_if_absent("log/1.json", b"x")
    assert str(root.parent.parent) not in synced


def test_folders_above_that_may_not_be_read_are_left_alone(
    store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_it = os.open

    def guarded(path: Path, *arguments: int) -> int:
        if path == root.parent.parent:
            raise PermissionError(errno.EACCES, "not allowed")
        return open_it(path, *arguments)

    root.mkdir(parents=True)
    monkeypatch.setattr(os, "open", guarded)
    assert store.put_if_absent("log/0.json", b"x")


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
    """An NFS client answers by names and listings that it has seen, until it is told to ask again."""
    (root / "log").mkdir(parents=True)
    asked: list[Path] = []

    def shown(folder: Path) -> None:
        asked.append(folder)
        (folder / f"{len(asked)}.json").write_bytes(b"x")

    monkeypatch.setattr(posix, "refresh_folder", shown)
    assert store.read("log/1.json") == b"x"
    assert [stat.path for stat in store.list("log/")] == ["log/1.json", "log/2.json"]
    assert asked == [root / "log"] * 2


def test_a_folder_is_refreshed_whether_it_is_there_or_not(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        posix_files.refresh_folder(folder)


def test_a_put_that_lost_syncs_the_winners_folder(store: PosixStore, root: Path, synced: list[str]) -> None:
    store.put_if_absent("log/0.json", b"x")
    synced.clear()
    assert not store.put_if_absent("log/0.json", b"y")
    assert str(root / "log") in synced


def test_a_bulk_write_is_synced_with_its_folders(store: PosixStore, root: Path, synced: list[str]) -> None:
    store.write("1/0-a/w", [b"w"])
    synced.clear()
    store.write("1/0-a/x", [b"x"])
    assert synced[:4] == [str(root / "1/0-a/x"), str(root / "1/0-a"), str(root / "1"), str(root)]


def test_nothing_but_objects_is_left_and_listed(store: PosixStore, root: Path) -> None:
    store.put_if_absent("log/0.json", b"x")
    store.put_if_absent("log/0.json", b"y")
    assert [path.name for path in (root / "log").iterdir()] == ["0.json"]
    (root / "log" / ".tmp-of-a-killed-process").write_bytes(b"")
    assert [stat.path for stat in store.list("")] == ["log/0.json"]


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("taken", [True, False])
def test_a_put_whose_temporary_file_was_taken_away_has_lost_or_is_put_again(
    store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch, linked: bool, taken: bool
) -> None:
    link = os.link

    def take_away(source: Path, target: Path) -> None:
        if taken:
            target.write_bytes(b"theirs")
        (put,) = store.list_unfinished_puts("log/")
        assert (put.path, put.target) == (f"log/{source.name}", "log/0.json")
        store.remove_unfinished_put(put)
        if not linked:
            raise OSError(errno.EPERM, "no links here")
        link(source, target)

    monkeypatch.setattr(os, "link", take_away)
    if taken:
        assert not store.put_if_absent("log/0.json", b"mine")
        assert store.read("log/0.json") == b"theirs"
    else:
        with pytest.raises(TransientStorageError, match="was taken away before it became"):
            store.put_if_absent("log/0.json", b"mine")
    assert store.list_unfinished_puts("log/") == ()


def test_only_temporary_files_of_puts_are_unfinished_puts(store: PosixStore, root: Path) -> None:
    store.put_if_absent("log/0.json", b"x")
    for name in (".tmp-", ".tmp-0.json", f".tmp--{32 * 'a'}", "0.json~", f"tmp-0.json-{32 * 'a'}"):
        (root / "log" / name).write_bytes(b"not ours")
    assert store.list_unfinished_puts("log/") == ()
    assert store.list_unfinished_puts("nothing/") == ()
    with pytest.raises(ValueError, match="is no name of a temporary file"):
        store.remove_unfinished_put(UnfinishedPut(path="log/0.json", target="log/1.json"))
    assert store.read("log/0.json") == b"x"


def test_folders_that_a_deletion_empties_go_and_the_root_stays(store: PosixStore, root: Path) -> None:
    store.write("1/0-a/x", [b"x"])
    store.write("1/0-a/y", [b"y"])
    store.delete("1/0-a/x")
    assert (root / "1" / "0-a").is_dir()
    store.delete("1/0-a/y")
    assert root.is_dir()
    assert not any(root.iterdir())


class OldLibrary:
    """A C library, or a kernel, that can't rename without replacing."""

    def __init__(self, number: int | None) -> None:
        if number is not None:
            self.renameat2 = lambda *_: ctypes.set_errno(number) or -1


@pytest.mark.parametrize("number", [None, errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_without_links_and_without_such_a_rename_a_file_system_is_refused(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    fail(monkeypatch, "link", errno.EPERM)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: OldLibrary(number))
    with pytest.raises(
        StorageError, match=r"can neither link files nor .* put the root on another file system"
    ):
        store.put_if_absent("log/0.json", b"x")
    assert store.list("") == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV])
def test_without_links_a_name_is_taken_by_a_rename_that_replaces_nothing(
    store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fail(monkeypatch, "link", number)
    assert store.put_if_absent("log/0.json", b"x")
    assert not store.put_if_absent("log/0.json", b"y")
    assert store.read("log/0.json") == b"x"
    assert [path.name for path in (root / "log").iterdir()] == ["0.json"]


def test_a_rename_without_an_answer_is_transient(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, "link", errno.EPERM)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: OldLibrary(errno.EIO))
    with pytest.raises(TransientStorageError, match=r"log/0\.json"):
        store.put_if_absent("log/0.json", b"x")


def test_what_nfs_keeps_of_a_deleted_file_is_no_object(store: PosixStore, root: Path) -> None:
    store.write("1/0-a/x", [b"x"])
    store.write("1/0-a/y", [b"y"])
    (root / "1/0-a/x").rename(root / "1/0-a/.nfs000000000012d687000000a1")
    store.delete("1/0-a/x")
    store.delete("1/0-a/y")
    assert store.list("") == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_link_without_an_answer_is_transient(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fail(monkeypatch, "link", number)
    with pytest.raises(TransientStorageError, match=r"log/0\.json"):
        store.put_if_absent("log/0.json", b"x")


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
    ("function", "number", "kind"),
    [
        ("writev", errno.ENOSPC, StorageError),
        ("writev", errno.EIO, TransientStorageError),
        ("fsync", errno.EDQUOT, StorageError),
    ],
)
def test_a_write_that_failed_left_nothing_and_can_be_done_again(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, function: str, number: int, kind: type[Exception]
) -> None:
    with monkeypatch.context() as broken:
        fail(broken, function, number)
        with pytest.raises(kind, match="1/0-a/x") as raised:
            store.write("1/0-a/x", [b"abc"])
        assert isinstance(raised.value, TransientStorageError) == (kind is TransientStorageError)
        assert store.list("") == []
    store.write("1/0-a/x", [b"abc"])
    assert store.read("1/0-a/x") == b"abc"


def test_short_writes_are_gone_on_with(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def stingy(descriptor: int, buffers: list[memoryview]) -> int:
        return write(descriptor, buffers[0][:3])

    monkeypatch.setattr(os, "writev", stingy)
    store.write("x", [b"0123456789", b"", memoryview(b"abcdefg")])
    assert store.read("x") == b"0123456789abcdefg"


def test_more_parts_than_one_call_takes(store: PosixStore) -> None:
    store.write("x", [bytes([number % 251]) for number in range(3000)])
    assert store.read("x") == bytes(number % 251 for number in range(3000))


def test_a_file_where_a_folder_should_be_is_named(store: PosixStore, root: Path) -> None:
    store.write("1", [b"a file"])
    with pytest.raises(StorageError, match="1/x"):
        store.write("1/x", [b"x"])


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


def test_a_folder_that_a_deletion_takes_away_while_another_is_made_in_it_is_made_again(
    store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is saved again while the last of its earlier data is deleted."""
    make = posix_files.make_folder
    taken: list[Path] = []

    def make_and_lose(folder: Path) -> None:
        make(folder)
        if folder == root / "20" and not taken:
            taken.append(folder)
            folder.rmdir()

    monkeypatch.setattr(posix_files, "make_folder", make_and_lose)
    Patience(sleep=lambda _: None).retry(lambda: store.write("20/4-new/__0_0.distcp", [b"data"]))
    assert taken
    assert store.read("20/4-new/__0_0.distcp") == b"data"
