"""Trainers and companions, as processes, killed before and after each of their storage operations.

Of each start every process is killed at every operation of every process. The next start goes on from the newest
commit, bit for bit, and nothing is in its way.
"""

import json
import multiprocessing
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Final

import pytest
from storage_explorer.oracle import Reading, check_data, read_log
from storage_kills.deadly import Fault, n_operations, was_killed
from storage_kills.spares import COMM
from storage_kills.trainer import Order, digest, state_of, train

from stepkeeper.cli.blocks import verify_commit
from stepkeeper.log import Log
from stepkeeper.storage import Store, open_store
from stepkeeper.storage.retry import DEFAULT_PATIENCE

N_SAMPLED: Final = 30
AT_ONCE: Final = 2
PATIENCE_S: Final = 120.0
FORKS: Final = multiprocessing.get_context("forkserver")
CHILDREN: Final = threading.Lock()
"""Held while a process is started or its end is read: a start reads the ends of the other threads' processes too, and
of two threads that read the same end one would be told 255."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The root before a start, and the operations of the start in which a process is killed."""

    before: tuple[int, ...] = ()
    """Steps of another start's commits."""

    garbage: bool = False
    """And a save that it gave up."""

    restores: int | None = None
    goes_back: int | None = None
    last: int = 0


PROGRAMS: Final = {
    "saving": Program(),
    "saving again": Program(before=(10, 20), restores=10),
    "going back": Program(before=(10, 15), goes_back=10),
    "deleting": Program(before=(10,), last=1),
    "collecting": Program(before=(10,), garbage=True),
}
Case = tuple[str, int]
"""A program's name, and the number of its ranks."""


def start(order: Order, world_size: int) -> tuple[set[int], list[list[dict[str, Any]]], str]:
    """Return the exit codes of a start's ranks, what each said, and all their output.

    All have ended by themselves; or killed, as soon as one has ended badly, as an operator would.
    """
    order.folder.mkdir()
    ranks = [
        FORKS.Process(target=train, args=(replace(order, rank=rank, world_size=world_size),), daemon=True)
        for rank in range(world_size)
    ]

    def codes() -> list[int | None]:
        with CHILDREN:
            return [each.exitcode for each in ranks]

    for each in ranks:
        with CHILDREN:
            each.start()
    try:
        await_so(lambda: None not in codes() or any(code not in (None, 0) for code in codes()))
    finally:
        for each in ranks:
            each.kill()
        await_so(lambda: None not in codes())
    ends = {code for code in codes() if code is not None}
    for each in ranks:
        each.close()
    # Companions end with their trainers.
    files = [order.folder / f"companion {rank} is" for rank in range(world_size)]
    await_so(lambda: not any(file.exists() and is_companion(int(file.read_text())) for file in files))
    texts = [(order.folder / f"{rank}.txt").read_text() for rank in range(world_size)]
    said = [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in texts]
    return ends, said, "\n".join(text[-3000:] for text in texts)


def await_so(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "processes don't come to an end"
        time.sleep(0.005)


def is_companion(pid: int) -> bool:
    try:
        command, status = (Path(f"/proc/{pid}/{name}").read_text() for name in ("cmdline", "stat"))
        # A dead one may wait for its end to be read.
        return "stepkeeper.companion" in command or (f"({COMM})" in status and ") Z" not in status)
    except (FileNotFoundError, ProcessLookupError):
        return False


def start_well(order: Order, world_size: int) -> list[dict[str, Any]]:
    codes, said, output = start(order, world_size)
    assert codes == {0}, output
    return [each for one in said for each in one]


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A program in which no process was killed."""

    program: Program
    world_size: int
    root: Path
    """As it was before."""

    tail: int
    faults: list[Fault]


def order_of(program: Program, folder: Path, root: Path, **changes: Any) -> Order:
    order = Order(
        folder=folder,
        uri=root.as_uri(),
        number=1,
        rank=-1,
        world_size=-1,
        steps=(20,),
        restores=program.restores,
        goes_back=program.goes_back,
        last=program.last,
    )
    return replace(order, **changes)


def prepared(program: Program, world_size: int, folder: Path) -> Whole:
    """Prepare what is there before the program starts, and count what its processes ask of the store."""
    root, copy = folder / "root", folder / "copy"
    root.mkdir(parents=True)
    plain: dict[str, Any] = {"restores": None, "goes_back": None, "last": 0}
    if program.before:
        start_well(
            order_of(program, folder / "earlier", root, number=0, steps=program.before, **plain), world_size
        )
    if program.garbage:
        open_store(root.as_uri()).write(f"15/0-{'e' * 32}/__0_0.distcp", [b"a save that was given up"])
    shutil.copytree(root, copy)
    start_well(order_of(program, folder / "whole", copy), world_size)
    processes = [f"{kind} {rank}" for rank in range(world_size) for kind in ("trainer", "companion")]
    faults = [
        Fault(process=process, number=number, moment=moment, victim=victim)
        for process in processes
        for number in range(n_operations(folder / "whole", process))
        for moment, victim in product(("before", "after"), processes)
    ]
    tail = Log(open_store(root.as_uri())).open().tail
    return Whole(program=program, world_size=world_size, root=root, tail=tail, faults=faults)


def kill(whole: Whole, fault: Fault, folder: Path, *, forks: bool) -> bool:
    """All is well after `fault`; False if it never came to that."""
    folder.mkdir()
    root = folder / "root"
    shutil.copytree(whole.root, root)
    store = open_store(root.as_uri())
    order = order_of(whole.program, folder / "faulty", root, fault=fault, forks=forks)
    codes, by_rank, output = start(order, whole.world_size)
    said = [each for one in by_rank for each in one]
    reading = checked(store)
    for each in said:
        assert each["event"] != "committed" or any(
            commit["step"] == each["step"] and number_of(whole, commit) == 1
            for commit in reading.bodies.values()
        ), f"{each} was said and isn't so"
    if fault.victim.startswith("companion") and any(each["event"] == "restored" for each in said):
        # A companion that is lost costs one save at most, and no trainer.
        assert codes == {0}, output
        steps = [each["step"] for each in by_rank[0] if each["event"] == "committed"]
        assert steps in ([20], [21], [20, 21], [20, 22]), output
    following = replace(order, folder=folder / "following", number=2, steps=(40,), fault=None)
    last = start_well(replace(following, restores=None, goes_back=None), whole.world_size)
    head = None if reading.head is None else reading.bodies[reading.head]
    newest = (-1, -1) if head is None else (number_of(whole, head), head["step"])
    restored = {each["digest"] for each in last if each["event"] == "restored"}
    assert restored == {digest(state_of(*newest))}
    if whole.program.goes_back is not None:
        check_went_back(reading, whole.program.goes_back)
    check_end(store, whole.program)
    return was_killed(order.folder)


def check_went_back(reading: Reading, step: int) -> None:
    """Check that what was saved after that descends from there."""
    for commit in reading.bodies.values():
        if commit["step"] in {20, 21, 22}:
            parent = reading.bodies[commit["parent"]]
            assert parent["step"] == step or 20 <= parent["step"] < commit["step"]


def number_of(whole: Whole, commit: Mapping[str, Any]) -> int:
    """Return the number of the start that saved it."""
    claim = int(commit["folder"].partition("/")[2].partition("-")[0])
    return int(claim > whole.tail)


def checked(store: Store) -> Reading:
    """Every live commit is whole."""
    objects = {stat.path: store.read(stat.path) for stat in store.list("")}
    reading = read_log(objects)
    for commit in reading.live.values():
        check_data(objects, commit)
    if reading.bodies:
        for record in Log(store).open().live:
            assert verify_commit(store, record, patience=DEFAULT_PATIENCE).bad == ()
    return reading


def check_end(store: Store, program: Program) -> None:
    """The following start has saved, and deleted what is of no use, whoever left it behind."""
    reading = checked(store)
    assert reading.head is not None
    assert reading.bodies[reading.head]["step"] == 40
    live = {commit["folder"] for commit in reading.live.values()}
    there = {
        stat.path.rpartition("/")[0] for stat in store.list("") if not stat.path.startswith(".stepkeeper")
    }
    assert there == live
    if program.last:
        assert len(live) == program.last


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Case], Whole]]:
    """Of each case, made once. Trainers are forked from a process that has torch in it already."""
    made: dict[Case, Whole] = {}
    folder = tmp_path_factory.mktemp("wholes")
    FORKS.set_forkserver_preload(["torch", "torch.distributed", "stepkeeper.manager"])

    def whole(case: Case) -> Whole:
        if case not in made:
            made[case] = prepared(PROGRAMS[case[0]], case[1], folder / f"{case[0]} {case[1]}")
        return made[case]

    yield whole
    # Its memory is of no more use; who wants one later starts another.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # there is no public way


def kill_all(folder: Path, cases: Sequence[tuple[Whole, Fault]], *, forks: bool) -> None:
    def one(number: int) -> bool:
        whole, fault = cases[number]
        try:
            return kill(whole, fault, folder / str(number), forks=forks)
        except BaseException as error:
            error.add_note(f"{fault} of {whole.program} with {whole.world_size} ranks")
            raise

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            assert all(pool.map(one, range(len(cases))))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@pytest.mark.timeout(900)
def test_wherever_one_is_killed_the_next_start_has_the_newest_commit(
    wholes: Callable[[Case], Whole], tmp_path: Path
) -> None:
    seed = int(os.environ.get("STEPKEEPER_SEED", "0")) or int.from_bytes(os.urandom(4))
    print(f"STEPKEEPER_SEED={seed}")
    chance = random.Random(seed)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        cases = list(pool.map(wholes, product(PROGRAMS, (1, 2))))
    sampled = (cases[number % len(cases)] for number in range(N_SAMPLED))
    kill_all(tmp_path, [(whole, chance.choice(whole.faults)) for whole in sampled], forks=False)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_wherever_any_is_killed_the_next_start_has_the_newest_commit(
    wholes: Callable[[Case], Whole], tmp_path: Path, name: str, world_size: int
) -> None:
    whole = wholes((name, world_size))
    kill_all(tmp_path, [(whole, fault) for fault in whole.faults], forks=True)
