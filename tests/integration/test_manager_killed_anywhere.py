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
from functools import partial
from itertools import product
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

import pytest
from storage_explorer.oracle import Reading, check_data, read_log
from storage_kills.deadly import Fault, n_operations, was_killed
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

_GARBAGE: Final = "e" * 32


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
CASES: Final = tuple(product(PROGRAMS, (1, 2)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The end of all ranks of one start, and their output."""

    folder: Path
    codes: tuple[int | None, ...]
    world_size: int

    def said(self, rank: int, event: str) -> list[dict[str, Any]]:
        lines = (self.folder / f"{rank}.txt").read_text().splitlines()
        said = [json.loads(line) for line in lines if line.startswith("{")]
        return [each for each in said if each["event"] == event]

    def all_said(self, event: str) -> list[dict[str, Any]]:
        return [each for rank in range(self.world_size) for each in self.said(rank, event)]

    def output(self) -> str:
        return "\n".join((self.folder / f"{rank}.txt").read_text()[-3000:] for rank in range(self.world_size))


def start(order: Order, world_size: int) -> Start:
    """All ranks have ended: by themselves; or killed, as soon as one has ended badly, as an operator would."""
    order.folder.mkdir()
    ranks = [
        FORKS.Process(target=train, args=(replace(order, rank=rank, world_size=world_size),), daemon=True)
        for rank in range(world_size)
    ]
    for each in ranks:
        with CHILDREN:
            each.start()
    try:
        await_end(ranks)
    finally:
        codes = []
        for each in ranks:
            each.kill()
            codes.append(await_exit_code(each))
    await_companions(order.folder, world_size)
    return Start(folder=order.folder, codes=tuple(codes), world_size=world_size)


def exit_code(process: ForkServerProcess) -> int | None:
    with CHILDREN:
        return process.exitcode


def await_exit_code(killed: ForkServerProcess) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while (code := exit_code(killed)) is None:
        assert time.monotonic() < deadline, "a killed rank doesn't come to an end"
        time.sleep(0.005)
    killed.close()
    return code


def await_end(ranks: Sequence[ForkServerProcess]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while None in (codes := [exit_code(each) for each in ranks]):
        if any(code not in (None, 0) for code in codes):
            return
        assert time.monotonic() < deadline, "the ranks don't come to an end"
        time.sleep(0.005)


def await_companions(folder: Path, world_size: int) -> None:
    """They end with their trainers."""
    deadline = time.monotonic() + PATIENCE_S
    for rank in range(world_size):
        pid_file = folder / f"companion {rank} is"
        while pid_file.exists() and is_companion(int(pid_file.read_text())):
            assert time.monotonic() < deadline, f"companion {rank} has outlived its trainer"
            time.sleep(0.005)


def is_companion(pid: int) -> bool:
    try:
        return b"stepkeeper.companion" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A program that nobody was killed in."""

    program: Program
    world_size: int
    root: Path
    """As it was before."""

    tail: int
    n_operations: Mapping[str, int]
    """By process."""

    def faults(self) -> list[Fault]:
        return [
            Fault(process=process, number=number, moment=moment, victim=victim)
            for process, n in self.n_operations.items()
            for number in range(n)
            for moment in ("before", "after")
            for victim in self.n_operations
        ]


def order_of(program: Program, folder: Path, root: Path, fault: Fault | None = None) -> Order:
    return Order(
        folder=folder,
        uri=root.as_uri(),
        number=1,
        rank=-1,
        world_size=-1,
        steps=(20,),
        restores=program.restores,
        goes_back=program.goes_back,
        last=program.last,
        fault=fault,
    )


def prepared(program: Program, world_size: int, folder: Path) -> Whole:
    """Prepare what is there before the program starts, and count what its processes ask of the store."""
    folder.mkdir(parents=True)
    root = folder / "root"
    root.mkdir()
    if program.before:
        order = replace(order_of(program, folder / "earlier", root), number=0, steps=program.before)
        earlier = start(replace(order, restores=None, goes_back=None, last=0), world_size)
        assert set(earlier.codes) == {0}, earlier.output()
    if program.garbage:
        open_store(root.as_uri()).write(f"15/0-{_GARBAGE}/__0_0.distcp", [b"a save that was given up"])
    copy = folder / "copy"
    shutil.copytree(root, copy)
    whole = start(order_of(program, folder / "whole", copy), world_size)
    assert set(whole.codes) == {0}, whole.output()
    processes = [f"{kind} {rank}" for rank in range(world_size) for kind in ("trainer", "companion")]
    return Whole(
        program=program,
        world_size=world_size,
        root=root,
        tail=Log(open_store(root.as_uri())).open().tail,
        n_operations={process: n_operations(whole.folder, process) for process in processes},
    )


def kill(whole: Whole, fault: Fault, folder: Path) -> bool:
    """All is well after `fault`; False if it never came to that."""
    folder.mkdir()
    root = folder / "root"
    shutil.copytree(whole.root, root)
    store = open_store(root.as_uri())
    faulty = start(order_of(whole.program, folder / "faulty", root, fault), whole.world_size)
    reading = checked(store)
    for each in faulty.all_said("committed"):
        assert any(
            commit["step"] == each["step"] and number_of(whole, commit) == 1
            for commit in reading.bodies.values()
        ), f"{each} was said and isn't so"
    if fault.victim.startswith("companion") and faulty.all_said("restored"):
        check_went_on(faulty)
    following = replace(
        order_of(whole.program, folder / "following", root),
        number=2,
        steps=(40,),
        restores=None,
        goes_back=None,
    )
    last = start(following, whole.world_size)
    assert set(last.codes) == {0}, last.output()
    head = None if reading.head is None else reading.bodies[reading.head]
    newest = (-1, -1) if head is None else (number_of(whole, head), head["step"])
    assert {each["digest"] for each in last.all_said("restored")} == {digest(state_of(*newest))}
    if whole.program.goes_back is not None:
        check_went_back(reading, whole.program.goes_back)
    check_end(store, whole.program)
    return was_killed(faulty.folder)


def check_went_on(faulty: Start) -> None:
    """A companion that is lost costs one save at most, and no trainer."""
    assert set(faulty.codes) == {0}, faulty.output()
    steps = [each["step"] for each in faulty.said(0, "committed")]
    assert steps in ([20], [21], [20, 21], [20, 22]), faulty.output()


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
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Whole]]:
    """By program and number of ranks. Trainers are forked from a process that has torch in it already."""
    made: dict[tuple[str, int], Whole] = {}
    folder = tmp_path_factory.mktemp("wholes")
    FORKS.set_forkserver_preload(["torch", "torch.distributed", "stepkeeper.manager"])

    def whole(name: str, world_size: int) -> Whole:
        case = (name, world_size)
        if case not in made:
            made[case] = prepared(PROGRAMS[name], world_size, folder / f"{name} {world_size}")
        return made[case]

    yield whole
    # Its memory is of no more use to anybody; who wants one later starts another.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # there is no public way


def seed() -> int:
    """STEPKEEPER_SEED, or a new one, printed."""
    chosen = int(os.environ.get("STEPKEEPER_SEED", "0")) or int.from_bytes(os.urandom(4))
    print(f"STEPKEEPER_SEED={chosen}")
    return chosen


def kill_all(folder: Path, cases: Sequence[tuple[Whole, Fault]]) -> None:
    def one(number: int) -> bool:
        whole, fault = cases[number]
        try:
            return kill(whole, fault, folder / str(number))
        except BaseException as error:
            error.add_note(f"{fault} of {whole.program} with {whole.world_size} ranks")
            raise
        finally:
            if number % 10 == 0:
                print(f"{number} of {len(cases)}: {fault}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            killed = list(pool.map(one, range(len(cases))))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    print(f"{sum(killed)} of {len(cases)} killed")
    assert all(killed)


@pytest.mark.timeout(900)
def test_wherever_one_is_killed_the_next_start_has_the_newest_commit(
    wholes: Callable[[str, int], Whole], tmp_path: Path
) -> None:
    chance = random.Random(seed())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        prepared_cases = list(pool.map(partial(_unpacked, wholes), CASES))
    cases = [
        (whole, chance.choice(whole.faults()))
        for whole in (prepared_cases[number % len(prepared_cases)] for number in range(N_SAMPLED))
    ]
    kill_all(tmp_path, cases)


def _unpacked(wholes: Callable[[str, int], Whole], case: tuple[str, int]) -> Whole:
    return wholes(*case)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_wherever_any_is_killed_the_next_start_has_the_newest_commit(
    wholes: Callable[[str, int], Whole], tmp_path: Path, name: str, world_size: int
) -> None:
    whole = wholes(name, world_size)
    kill_all(tmp_path, [(whole, fault) for fault in whole.faults()])
