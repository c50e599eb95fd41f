"""Test faults of a store under a running job: they are reported, earlier steps stay, and the next save works again.

One manager with its companion process lives through all faults of a back end. Folders are on a small tmpfs in a mount
namespace of their own, and the job's user is nobody; a bucket is an emulator behind a proxy.
"""

import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest
from storage_faults.folder import PAGE_BYTES, Folder, job_on_tmpfs
from storage_faults.job import Job, impatient_companions
from storage_faults.proxy import Fault, Proxy, faulty

from stepcluster import binaries
from stepkeeper.storage.gcs import GcsStore
from stepkeeper_testing.gcs import BUCKET, fake_gcs_server

LOG: Final = ".stepkeeper/log/"
WELL: Final = {"committed": 1, "health": None, "ok": True}
"""What is said of a first save."""


@dataclass(kw_only=True)
class Run:
    """A job that is through some faults already."""

    place: Any
    step: int = 0

    def saved(self) -> dict[str, Any]:
        """The next step is saved, if it can be."""
        self.step += 1
        said: dict[str, Any] = self.place.save(self.step)
        return said

    def save_well(self) -> int:
        said = self.saved()
        assert said == WELL | {"committed": self.step}
        return self.step

    def fail(self, fault: Callable[[], object], mend: Callable[[], object], says: str) -> None:
        """A save fails, and this is said at the next call and by health(); nothing else is lost, and it goes on."""
        before = [self.save_well(), self.save_well()]
        contents = self.place.contents()
        fault()
        try:
            said = self.saved()
        finally:
            mend()
        assert said["committed"] == before[-1]
        assert not said["ok"]
        assert re.search(says, said["health"]), said["health"]
        raised = self.saved()["raised"]
        assert raised.startswith("SaveError: a save in the background failed")
        assert re.search(says, raised), raised
        self.check(before, contents)

    def check(self, before: list[int], contents: dict[str, str]) -> None:
        """Check that earlier steps are as they were, and that the next save is another one that can be restored."""
        after = self.save_well()
        assert contents.items() <= self.place.contents().items()
        assert self.place.check([*before, after]) == {"right": [*before, after]}


# Folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    if os.geteuid() != 0:
        pytest.skip("mounts a file system: needs root")
    with job_on_tmpfs(tmp_path_factory.mktemp("mounts") / "small") as folder:
        yield folder


@pytest.fixture(scope="module")
def run_on_folder(folder: Folder) -> Iterator[Run]:
    assert folder.ask("open", folder.uri) == {"step": None}
    run = Run(place=folder)
    run.save_well()
    yield run
    run.save_well()
    assert folder.ask("close") == {}


def pages_of_a_save(folder: Folder) -> dict[str, int]:
    """Return the sizes of the newest step's files in pages, by the name of the file."""
    (newest,) = max(folder.root.glob("[0-9]*"), key=lambda path: int(path.name)).iterdir()
    return {path.name: path.stat().st_blocks * 512 // PAGE_BYTES for path in newest.iterdir()}


@pytest.mark.parametrize("at", ["__0_0.distcp", ".metadata", "manifest.0.json", LOG])
def test_a_disk_is_full_when_it_comes_to(run_on_folder: Run, folder: Folder, at: str) -> None:
    run_on_folder.save_well()
    pages = pages_of_a_save(folder)
    assert sorted(pages) == [".metadata", "__0_0.distcp", "manifest.0.json"]
    written = {
        "__0_0.distcp": pages["__0_0.distcp"] // 2,
        ".metadata": pages["__0_0.distcp"],
        "manifest.0.json": pages["__0_0.distcp"] + pages[".metadata"],
        LOG: sum(pages.values()),
    }
    run_on_folder.fail(
        lambda: folder.fill(written[at]), folder.empty, rf"{re.escape(at)}.*No space left on device"
    )


FOLDER_FAULTS: Final[dict[str, tuple[Callable[[Folder], object], Callable[[Folder], object], str]]] = {
    "no names left": (Folder.take_names, Folder.give_names, "No space left on device"),
    "read-only": (lambda it: it.remount("ro"), lambda it: it.remount("rw"), "Read-only file system"),
    "the root may not be written to": (
        lambda it: it.root.chmod(0o555),
        lambda it: it.root.chmod(0o755),
        "Permission denied",
    ),
    "the log may not be written to": (
        lambda it: (it.root / LOG).chmod(0o555),
        lambda it: (it.root / LOG).chmod(0o755),
        f"{LOG}.*Permission denied",
    ),
}
"""What breaks a folder, what mends it, and how it is told."""


@pytest.mark.parametrize("name", FOLDER_FAULTS)
def test_a_folder_fails(run_on_folder: Run, folder: Folder, name: str) -> None:
    breaks, mends, says = FOLDER_FAULTS[name]
    run_on_folder.fail(lambda: breaks(folder), lambda: mends(folder), says)


# Buckets


class Bucket:
    """A prefix in an emulator, seen without the proxy that the job has in front of it."""

    def __init__(self, store: GcsStore, job: Job) -> None:
        self._store = store
        self._job = job

    def save(self, step: int) -> dict[str, Any]:
        return self._job.save(step)

    def check(self, steps: list[int]) -> dict[str, Any]:
        return self._job.check(steps)

    def contents(self) -> dict[str, str]:
        return {stat.path: f"{stat.size_bytes} {stat.crc32c}" for stat in self._store.list("")}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("fake-gcs-server")
    with (
        fake_gcs_server(binaries.ensure()["fake-gcs-server"], folder) as address,
        faulty(address) as proxy,
    ):
        yield proxy


@pytest.fixture(scope="module")
def run_on_bucket(proxy: Proxy) -> Iterator[Run]:
    prefix = f"runs/{secrets.token_hex(8)}"
    with pytest.MonkeyPatch.context() as patch, impatient_companions():
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://{proxy.target}")
        store = GcsStore(bucket=BUCKET, prefix=prefix)
        patch.setenv("STORAGE_EMULATOR_HOST", proxy.address)
        job = Job()
        assert job.open(f"gs://{BUCKET}/{prefix}") == {"step": None}
        run = Run(place=Bucket(store, job))
        run.save_well()
        yield run
        run.save_well()
        job.close()
        store.close()


def always(fault: Fault) -> Callable[[str, str], Fault]:
    return lambda method, about: fault


def on(name: str, fault: Fault) -> Callable[[str, str], Fault]:
    """The fault of requests that put such an object."""
    return lambda method, about: fault if method in ("POST", "PUT") and name in about else "none"


def first_on(name: str, fault: Fault) -> Callable[[str, str], Fault]:
    """Return a function that applies the fault to the first such request alone."""
    left = [fault]
    every = on(name, fault)
    return lambda method, about: left.pop() if left and every(method, about) == fault else "none"


FAILURES: Final = {
    "the bucket is gone": (always(404), f"there is no bucket '{BUCKET}'"),
    "credentials have expired": (always(401), "gs://.*distcp: no valid credentials"),
    "permission denied": (always(403), r"not allowed.*roles/storage\.objectUser"),
    "a storm of 503": (always(503), "503"),
    "connections are reset": (always("lost"), "distcp"),
    "what is applied gets no answer": (on(".distcp", "answer lost"), "distcp"),
    "what is applied is answered with 503": (on(".distcp", "applied, then 503"), "distcp"),
    "uploads get stuck": (on(".distcp", "stuck"), "distcp.*[Tt]imed? ?out"),
}
"""What a save doesn't get over, as long as it goes on, and how it is told."""

DELAYS: Final = {
    "everything is slow": always("slow"),
    "what is refused is applied later": first_on(".distcp", "503, then applied"),
    "an entry is refused and applied later": on(LOG, "503, then applied"),
    "an entry is applied without an answer": on(LOG, "answer lost"),
    "an entry is applied and answered with 503": on(LOG, "applied, then 503"),
}
"""What a save gets over by itself, as soon as it ends, without an error."""


@pytest.mark.parametrize("name", FAILURES)
def test_a_bucket_fails(run_on_bucket: Run, proxy: Proxy, name: str) -> None:
    rule, says = FAILURES[name]
    run_on_bucket.fail(lambda: proxy.break_by(rule), proxy.mend, says)


@pytest.mark.parametrize("name", DELAYS)
def test_a_bucket_is_late(run_on_bucket: Run, proxy: Proxy, name: str) -> None:
    before = [run_on_bucket.save_well()]
    contents = run_on_bucket.place.contents()
    n_entries = sum(path.startswith(LOG) for path in contents)
    proxy.break_by(DELAYS[name])
    mending = threading.Timer(1.5, proxy.mend)
    mending.start()
    try:
        before.append(run_on_bucket.save_well())
    finally:
        mending.cancel()
        proxy.mend()
    assert sum(path.startswith(LOG) for path in run_on_bucket.place.contents()) == n_entries + 1
    run_on_bucket.check(before, contents)
