"""Test faults of a store under a running job: they are reported, earlier steps stay, and the next save works again.

One manager with its companion process lives through all faults. Folders are on a small tmpfs in a mount namespace of
their own, and the job's user is nobody.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest
from storage_faults.folder import Folder, job_on_tmpfs

LOG: Final = ".stepkeeper/log/"
WELL: Final = {"committed": 1, "health": None, "ok": True}
"""What is said of a first save."""


@dataclass(kw_only=True)
class Run:
    """A job that is through some faults already."""

    place: Folder
    step: int = 0

    def saved(self) -> dict[str, Any]:
        """The next step is saved, if it can be."""
        self.step += 1
        return self.place.save(self.step)

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
        after = self.save_well()
        assert contents.items() <= self.place.contents().items()
        assert self.place.check([*before, after]) == {"right": [*before, after]}


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


FOLDER_FAULTS: Final[dict[str, tuple[Callable[[Folder], object], Callable[[Folder], object], str]]] = {
    "full": (lambda it: it.fill(1), Folder.empty, r"__0_0\.distcp.*No space left on device"),
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
