"""The power is cut after any operation of a file system: what was answered before is there, and a start goes on.

A disk keeps what was synced: a file's bytes by the file's fsync, a name by its folder's. Anything else may be there or
not, each name and each file for itself. Where all of it is there, a process was killed and the machine runs on.
"""

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, final

import pytest
from storage_disk.companions import Companions, check_root
from storage_disk.disk import Answered, Contents, Disk, Killed, Op, Recorder, write_out
from store_parts.behind import Behind
from typing_extensions import override

from stepkeeper.errors import FencedError
from stepkeeper.log import Log
from stepkeeper.log.tail import LOG_PREFIX
from stepkeeper.retention.garbage import gc
from stepkeeper.storage import direct, posix
from stepkeeper.storage.base import Buffer, Store
from stepkeeper.storage.posix import PosixStore
from stepkeeper.storage.posix_files import rename_no_replace

ROOT: Final = "runs/x"
SEED: Final = 20261121


@final
class Told(Behind):
    """A store, and a record of what it has answered."""

    def __init__(self, inner: Store, recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    @override
    def put_if_absent(self, path: str, data: bytes) -> bool:
        won = super().put_if_absent(path, data)
        # Who lost acts on what is there: that has to last as well.
        self._recorder.note(Answered(path, data if won else self.read(path)))
        return won

    @override
    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        super().write(path, parts)
        self._recorder.note(Answered(path, b"".join(parts)))

    @override
    def delete(self, path: str) -> None:
        self._recorder.note(Answered(path, None))
        super().delete(path)


@final
class Machine:
    """The machine of a scenario: a disk whose operations are recorded."""

    def __init__(self, disk: Path, recorder: Recorder) -> None:
        self.recorder = recorder
        self.root = disk / ROOT
        self.first = 0
        """What is recorded before is history: nobody cuts the power there."""

    def store(self) -> Told:
        return Told(PosixStore(self.root), self.recorder)

    def start(self, *, last: int | None = None, n_ranks: int = 1) -> Companions:
        """A start of the job has claimed the root."""
        companions = Companions(
            self.root.as_uri(), n_ranks, last=last, wrap=lambda rank, store: Told(store, self.recorder)
        )
        companions.begin()
        return companions

    def now(self) -> None:
        self.first = len(self.recorder.ops)

    def killed_in(self, act: Callable[[], object], kills: Callable[[Op], bool]) -> None:
        """A process that does that was killed after the operation that `kills` picks."""
        self.recorder.kills = kills
        with pytest.raises(Killed):
            act()
        self.recorder.revive()


def saving(machine: Machine) -> None:
    machine.start().save(10)


def saving_again(machine: Machine) -> None:
    """The same step, by a later start."""
    machine.start().save(10)
    machine.now()
    machine.start().save(10)


def giving_up(machine: Machine) -> None:
    """One of two ranks is killed while it writes: the other one voids the save, and both save the step again."""
    companions = machine.start(n_ranks=2)
    companions.save(10)
    machine.now()
    orders = [companions.order(20, rank, "e" * 32) for rank in (0, 1)]
    machine.killed_in(lambda: companions.write(orders[1]), lambda op: op.kind == "write")
    companions.write(orders[0])
    companions.void(orders[0].folder)
    companions.save(20)


def deleting(machine: Machine) -> None:
    companions = machine.start(last=1)
    companions.save(10)
    machine.now()
    companions.save(20)


def collecting(machine: Machine) -> None:
    companions = machine.start()
    companions.save(10)
    companions.write(companions.order(20, 0, "e" * 32))
    later = machine.start()
    machine.now()
    gc(Log(machine.store()), machine.store())
    later.save(30)


def meeting_an_entry(machine: Machine) -> None:
    """A later start was killed when it had linked its begin; the earlier one learns that it lost."""
    earlier = machine.start()
    earlier.save(10)
    machine.now()
    machine.killed_in(machine.start, lambda op: op.kind == "link")
    with pytest.raises(FencedError):
        earlier.save(20)


def meeting_an_object(machine: Machine) -> None:
    """Write an object whose first write was killed when all was written but nothing synced."""
    machine.start().save(10)
    machine.now()
    path = f"20/0-{'c' * 32}/__0_0.distcp"
    machine.killed_in(lambda: machine.store().write(path, [b"bytes"]), lambda op: op.kind == "write")
    machine.store().write(path, [b"bytes"])


def meeting_folders(machine: Machine) -> None:
    """Those who were killed have made the folder above the root, and the root, and nothing made them last."""
    machine.killed_in(machine.start, lambda op: op == Op("mkdir", "runs"))
    machine.killed_in(machine.start, lambda op: op == Op("mkdir", ROOT))
    machine.start().save(10)


def passing_the_cache(machine: Machine) -> None:
    """An object large enough to be written to the disk itself, several blocks and a part of one."""
    machine.start().save(10)
    machine.now()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "_LEAST_BYTES", 1)
        patch.setattr(direct, "_AT_ONCE_BYTES", 4096)
        machine.store().write(f"20/0-{'d' * 32}/__0_0.distcp", [bytes(9000), memoryview(b"the end")])


SCENARIOS: Final = (
    saving,
    saving_again,
    giving_up,
    deleting,
    collecting,
    meeting_an_entry,
    meeting_an_object,
    meeting_folders,
    passing_the_cache,
)


def record(disk: Path, scenario: Callable[[Machine], None]) -> Machine:
    disk.mkdir()
    machine = Machine(disk, Recorder(disk))
    with machine.recorder.recording():
        scenario(machine)
    return machine


def replay(machine: Machine, folder: Path) -> int:
    """Wherever the power is cut, all is well; answers how many states of the disk that were."""
    disk, answered = Disk(), dict[str, bytes]()
    seen: set[tuple[frozenset[tuple[str, bytes | None]], frozenset[str]]] = set()
    for number, op in enumerate(machine.recorder.ops):
        if isinstance(op, Op):
            disk.apply(op)
        elif op.data is None:
            answered.pop(op.path, None)
        else:
            answered[op.path] = op.data
        if number < machine.first:
            continue
        for name, left in disk.cuts(SEED + number):
            state = (frozenset(left.items()), frozenset(answered))
            if state in seen:
                continue
            seen.add(state)
            try:
                check(left, answered, folder)
            except Exception as error:
                error.add_note(f"the power was cut after operation {number} ({str(op)[:200]}), left: {name}")
                raise
    return len(seen)


def check(left: Contents, answered: dict[str, bytes], folder: Path) -> None:
    for path, data in answered.items():
        assert left.get(f"{ROOT}/{path}") == data, f"{path} was answered and is gone, or has other bytes"
    slots = [
        int(Path(path).stem)
        for path, data in answered.items()
        if path.startswith(LOG_PREFIX) and json.loads(data)["kind"] == "commit"
    ]
    write_out(left, folder)
    check_root(PosixStore(folder / ROOT), committed=max(slots, default=-1))


@pytest.fixture
def replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder where a disk is put together again. No power is cut meanwhile: fsync does nothing."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return tmp_path / "replayed"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_that_was_answered_is_lost(
    tmp_path: Path, replayed: Path, scenario: Callable[[Machine], None]
) -> None:
    n_states = replay(record(tmp_path / "disk", scenario), replayed)
    print(f"{n_states} states of the disk")
    assert n_states >= 5


def test_nothing_is_lost_where_files_cannot_be_linked(
    tmp_path: Path, replayed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: Path, target: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links here")

    def renaming(machine: Machine) -> None:
        rename = machine.recorder.renaming(rename_no_replace)
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", refused)
            patch.setattr(posix, "rename_no_replace", rename)
            saving(machine)

    machine = record(tmp_path / "disk", renaming)
    assert any(isinstance(op, Op) and op.kind == "rename" for op in machine.recorder.ops)
    replay(machine, replayed)
