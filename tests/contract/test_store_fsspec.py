"""Test that stores on fsspec's file systems do what every store has to do, or are refused before anything is put."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem
from typing_extensions import override

from stepkeeper.companion.messages import ClaimRequest, OpenRequest
from stepkeeper.companion.session import Session
from stepkeeper.errors import (
    MissingObjectError,
    NoAccessError,
    NotExclusiveError,
    StorageError,
    TransientStorageError,
)
from stepkeeper.storage import open_store
from stepkeeper.storage.exclusive_create import RACERS
from stepkeeper.storage.fsspec import FsspecStore
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.store import StoreContract

NO_PATIENCE = Patience(total_s=0)
AT_ONCE = Patience(sleep=lambda _: None)
DAY_UNIX_S = 1767312000.0


class BucketFileSystem(AsyncFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Its create is decided by the server, in one moment."""

    protocol = "bucket"
    cachable = False

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__()
        self.objects = objects
        self.buckets = {"checkpoints"}

    @override
    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        await self._request(path)
        if mode == "create" and path in self.objects:
            raise FileExistsError(path)
        self.objects[path] = bytes(value)
        await asyncio.sleep(0)

    @override
    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        await self._request(path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        if start is not None and start >= len(self.objects[path]):
            raise OSError(22, "InvalidRange")
        return self.objects[path][start:end]

    @override
    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        await self._request(path)
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file"}
        if any(name.startswith(f"{path}/") for name in self.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    @override
    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        await self._request(path)
        below = [name for name in self.objects if name.startswith(f"{path}/")]
        names = sorted({"/".join(name.split("/")[: path.count("/") + 2]) for name in below})
        return [await self._info(name) if detail else name for name in names]

    @override
    async def _rm_file(self, path: str, **_: Any) -> None:
        await self._request(path)
        self.objects.pop(path, None)

    async def _request(self, path: str) -> None:
        await asyncio.sleep(0.001)
        if path.split("/", maxsplit=1)[0] not in self.buckets:
            raise FileNotFoundError("NoSuchBucket")


class LookingFileSystem(BucketFileSystem):
    """Its create looks first, and writes then: right as long as nobody else does.

    A look at a free name is answered once all racers of the proof have looked, however they are scheduled.
    """

    @override
    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.all_looked = asyncio.Barrier(RACERS)

    @override
    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        taken = path in self.objects
        if mode == "create" and taken:
            raise FileExistsError(path)
        await self.all_looked.wait()
        self.objects[path] = bytes(value)


class OverwritingFileSystem(BucketFileSystem):
    """Knows no create, and doesn't say so."""

    @override
    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        await super()._pipe_file(path, value)


class ForgetfulFileSystem(BucketFileSystem):
    """Tells the right one that it won, and keeps what came last."""

    @override
    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        try:
            await super()._pipe_file(path, value, mode)
        except FileExistsError:
            self.objects[path] = bytes(value)
            raise


class InheritedCreate(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Has what fsspec gives to all: a look, and then a write."""

    pipe_file = AbstractFileSystem.pipe_file


class LosingFileSystem(BucketFileSystem):
    """Loses answers to creates that went through."""

    @override
    def __init__(self, objects: dict[str, bytes], losses: int) -> None:
        super().__init__(objects)
        self.losses = losses

    @override
    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        await super()._pipe_file(path, value, mode)
        if self.losses:
            self.losses -= 1
            raise TimeoutError


def store_on(filesystem: AbstractFileSystem, *, root: str = "checkpoints/run", **options: Any) -> FsspecStore:
    return FsspecStore(filesystem, root, uri=f"bucket://{root}", **options)


class TestBucketStore(StoreContract):
    tells_times = False

    @pytest.fixture
    def objects(self) -> dict[str, bytes]:
        return {"checkpoints/run-of-another/x": b"not ours"}

    @pytest.fixture
    def store(self, objects: dict[str, bytes]) -> FsspecStore:
        return store_on(BucketFileSystem(objects))

    @pytest.fixture
    def another(self, objects: dict[str, bytes]) -> FsspecStore:
        return store_on(BucketFileSystem(objects))


@pytest.mark.parametrize(
    ("filesystem", "why"),
    [
        (LookingFileSystem, "8 of 8 simultaneous creates of one name won"),
        (OverwritingFileSystem, "a create of an existing name succeeded"),
        (ForgetfulFileSystem, "although the create of"),
    ],
)
def test_where_two_could_win_nothing_is_put(filesystem: type[BucketFileSystem], why: str) -> None:
    objects: dict[str, bytes] = {}
    store = store_on(filesystem(objects))
    says = f"^bucket://checkpoints/run: .*{why}.*unsafe_single_writer=True"
    for _ in range(2):
        with pytest.raises(NotExclusiveError, match=says):
            store.put_if_absent(".stepkeeper/log/00000000.json", b"x")
    assert objects == {}


def test_a_create_that_looks_and_then_writes_is_refused_without_a_race() -> None:
    store = store_on(InheritedCreate(), root="/refused")
    with pytest.raises(NotExclusiveError, match="checks first and writes later"):
        store.put_if_absent("x", b"x")


def test_the_proof_is_made_once_leaves_nothing_and_outlasts_lost_answers() -> None:
    filesystem = LosingFileSystem({}, losses=3)
    store = store_on(filesystem, patience=AT_ONCE)
    assert store.put_if_absent("x", b"1")
    assert list(filesystem.objects) == ["checkpoints/run/x"]
    filesystem.losses = 1
    with pytest.raises(TransientStorageError, match="bucket://checkpoints/run/y: no answer"):
        store.put_if_absent("y", b"1")
    assert store.read("y") == b"1", "the outcome is unknown: it went in"
    filesystem.buckets.clear()
    store._prove()


def test_readers_and_who_says_so_put_no_proof_and_still_nothing_is_overwritten() -> None:
    filesystem = OverwritingFileSystem({"checkpoints/run/x": b"1"})
    store = store_on(filesystem)
    assert store.read("x") == b"1"
    assert [stat.path for stat in store.list("")] == ["x"]
    store = store_on(filesystem, unsafe_single_writer=True)
    assert store.put_if_absent("y", b"1")
    assert not store.put_if_absent("y", b"2")
    assert store.read("y") == b"1"


@pytest.mark.parametrize("promised", [True, False])
def test_a_companion_is_told_what_its_manager_was(promised: bool) -> None:
    objects: dict[str, bytes] = {}

    class Overwriting(OverwritingFileSystem):
        protocol = "stepkeeper-overwriting"

        def __init__(self, **_: Any) -> None:
            super().__init__(objects)

    fsspec.register_implementation("stepkeeper-overwriting", Overwriting, clobber=True)
    uri = "stepkeeper-overwriting://checkpoints/run"
    opening = OpenRequest(rank=0, world_size=1, uri=uri, unsafe_single_writer=promised)
    session = Session(opening, lambda directive: None)
    if promised:
        assert session.claim_root(ClaimRequest()).claim.slot == 0
        assert list(objects) == ["checkpoints/run/.stepkeeper/log/00000000.json"]
    else:
        with pytest.raises(NotExclusiveError, match="unsafe_single_writer=True"):
            session.claim_root(ClaimRequest())
        assert objects == {}


@pytest.mark.parametrize(
    ("raised", "becomes"),
    [
        (PermissionError("AccessDenied"), NoAccessError),
        (FileNotFoundError("NoSuchBucket"), NoAccessError),
        (type("NoCredentialsError", (Exception,), {})("as botocore has it"), NoAccessError),
        (type("ClientAuthenticationError", (Exception,), {})("as Azure has it"), TransientStorageError),
        (NotImplementedError("no"), StorageError),
        (OSError(28, "full"), StorageError),
        (OSError(16, "SlowDown"), TransientStorageError),
        (OSError(121, "InternalError"), TransientStorageError),
        (ConnectionResetError(), TransientStorageError),
    ],
)
def test_errors_name_the_object_and_say_whether_to_ask_again(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, becomes: type[StorageError]
) -> None:
    filesystem = BucketFileSystem({})
    store = store_on(filesystem, patience=NO_PATIENCE)

    def fail(*_: object, **__: object) -> None:
        raise raised

    for name in ("pipe_file", "rm_file", "find"):
        monkeypatch.setattr(filesystem, name, fail)
    for act in (lambda: store.write("5/x", [b"1"]), lambda: store.put_if_absent("5/x", b"1")):
        with pytest.raises(StorageError, match="bucket://checkpoints/run/") as found:
            act()
        assert type(found.value) is becomes


def test_an_error_of_a_read_condemns_nothing_and_no_bucket_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    filesystem = BucketFileSystem({"checkpoints/run/x": b"123"})
    store = store_on(filesystem)

    def fail(*_: object, **__: object) -> None:
        raise OSError(16, "SlowDown")

    monkeypatch.setattr(filesystem, "cat_file", fail)
    for place in ((), (1, 1)):
        with pytest.raises(TransientStorageError):
            store.read("x", *place)
    with pytest.raises(MissingObjectError):
        store.read("y")
    filesystem.buckets.clear()
    with pytest.raises(StorageError, match="there is no such bucket"):
        store.write("x", [b"1"])


@pytest.mark.parametrize(
    ("info", "time_unix_s"),
    [
        pytest.param({"LastModified": datetime(2026, 1, 2, tzinfo=UTC)}, DAY_UNIX_S, id="S3"),
        pytest.param({"last_modified": datetime(2026, 1, 2, tzinfo=UTC)}, DAY_UNIX_S, id="Azure"),
        pytest.param({"mtime": "2026-01-02T00:00:00.500Z"}, DAY_UNIX_S + 0.5, id="text, as RFC 3339 has it"),
        pytest.param({"created": datetime(2026, 1, 2)}, DAY_UNIX_S, id="without a zone: UTC"),  # noqa: DTZ001
        pytest.param({"mtime": 12.5, "created": 99.0}, 12.5, id="a local folder"),
        pytest.param({"mtime": 1767312000000}, None, id="milliseconds are no seconds"),
        pytest.param({"mtime": "yesterday"}, None, id="text that is no time"),
        pytest.param({"mtime": b"1"}, None, id="something else"),
        pytest.param({}, None, id="nothing"),
    ],
)
def test_the_time_of_an_object_is_what_its_file_system_says(
    monkeypatch: pytest.MonkeyPatch, info: dict[str, Any], time_unix_s: float | None
) -> None:
    filesystem = BucketFileSystem({})
    listed = {"checkpoints/run/x": {"name": "checkpoints/run/x", "size": 1, "type": "file", **info}}
    monkeypatch.setattr(filesystem, "find", lambda *_, **__: listed)
    (stat,) = store_on(filesystem).list("")
    assert stat.time_unix_s == time_unix_s


def test_a_scheme_that_fsspec_knows_is_opened_without_listing_caches() -> None:
    class Registered(BucketFileSystem):
        protocol = "stepkeeper-test"

        def __init__(self, **options: Any) -> None:
            super().__init__({})
            self.options = options

    fsspec.register_implementation("stepkeeper-test", Registered, clobber=True)
    store = open_store("stepkeeper-test://checkpoints/a/b/")
    assert isinstance(store, FsspecStore)
    assert store.uri == "stepkeeper-test://checkpoints/a/b"
    assert store._filesystem.options == {"use_listings_cache": False}
    store.write("x", [b"1"])
    assert list(store._filesystem.objects) == ["checkpoints/a/b/x"]
