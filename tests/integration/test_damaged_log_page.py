"""docs/operations/damaged-log.md: what it says to do is done, and a training goes on."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from page_blocks import read_blocks
from page_reader import Reader, reading

from stepkeeper.errors import DamagedEntryError, FencedError, LogGapError
from stepkeeper.log import Claim, Log
from stepkeeper.log.tail import slot_path
from stepkeeper.storage import open_store
from stepkeeper_testing.damage import contents
from stepkeeper_testing.trainer import open_manager

BLOCKS: Final = [block for block in read_blocks("docs/operations/damaged-log.md") if block.language == "bash"]
FOUND, STOPPED, PUT_BACK, SEEN, REPAIRED, CHECKED, STARTED, REMOVED = range(8)


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.full((300,), float(step)), "n": step}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slots 0 begin, 1 to 3 steps 1 to 3, 4 begin, 5 restored, 6 and 7 steps 4 and 5."""
    root = tmp_path_factory.mktemp("damaged") / "whole"
    for steps in ((1, 2, 3), (4, 5)):
        with open_manager(root.as_uri()) as manager:
            manager.restore(state_at(0))
            for step in steps:
                manager.save(step, state_at(step)).result()
    kinds = [Log(open_store(root.as_uri())).entry(slot).kind for slot in range(8)]
    assert kinds == ["begin", "commit", "commit", "commit", "begin", "restored", "commit", "commit"]
    return root


class Person:
    """Somebody who does what the page says, on a machine of their own."""

    def __init__(self, reader: Reader, root: Path, asked: Path) -> None:
        self._reader, self.root, self.asked = reader, root, asked
        reader.knows(URL=root.as_uri(), ROOT=str(root), JOB="lm")

    def does(self, block: int, exit_code: int = 0, **named: str) -> str:
        """Run each command of a block, check its exit code, and return what they printed."""
        self._reader.knows(**named)
        return self._reader.does(BLOCKS[block], exit_code=exit_code)


@pytest.fixture
def person(whole: Path, tmp_path: Path) -> Iterator[Person]:
    shutil.copytree(whole, tmp_path / "root")
    programs, asked = tmp_path / "programs", tmp_path / "asked"
    programs.mkdir()
    # No cluster is here: what it would be asked is written down.
    (programs / "kubectl").write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    (programs / "kubectl").chmod(0o755)
    with reading({"PATH": f"{programs}:{os.environ['PATH']}"}) as reader:
        yield Person(reader, tmp_path / "root", asked)


def let_an_hour_pass(root: Path) -> None:
    then = time.time() - 3600
    for path in root.rglob("*"):
        os.utime(path, (then, then))


DAMAGES: Final[Mapping[str, Callable[[bytes], bytes | None]]] = {
    "flipped": lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:],
    "cut": lambda data: data[:-50],
    "empty": lambda data: b"",
    "gone": lambda data: None,
}


def damage(root: Path, slots: Mapping[int, str]) -> None:
    for slot, how in slots.items():
        path = root / slot_path(slot)
        data = DAMAGES[how](path.read_bytes())
        path.unlink()
        if data is not None:
            path.write_bytes(data)


CASES: Final[Mapping[str, Mapping[int, str]]] = {
    "several in the middle": {2: "empty", 5: "flipped", 6: "cut"},
    "the newest, of no length": {7: "empty"},
    "the newest begin, which has the index": {4: "flipped"},
    "the first, and a gap where the index was": {0: "empty", 4: "gone"},
    "all of them": dict.fromkeys(range(8), "empty"),
}
"""What is damaged."""


@pytest.mark.parametrize("case", CASES)
def test_the_page_gets_a_training_going_again(person: Person, case: str) -> None:
    writer = Log(open_store(person.root.as_uri()))
    writer.open()
    assert writer.state.claim is not None
    claim = Claim(slot=writer.state.claim, nonce=writer.entry(writer.state.claim).nonce)
    damage(person.root, CASES[case])
    with (
        open_manager(person.root.as_uri()) as manager,
        pytest.raises((DamagedEntryError, LogGapError), match="stepkeeper repair file://"),
    ):
        manager.restore(state_at(0))
    let_an_hour_pass(person.root)
    before = contents(person.root)
    assert "BAD     log: " in person.does(FOUND)
    person.does(STOPPED)
    assert "latest    step 5 " in person.does(SEEN)
    assert contents(person.root) == before
    person.does(REPAIRED)
    after = contents(person.root)
    assert {path: after[path] for path in before} == before
    assert "latest" in person.does(CHECKED)
    person.does(STARTED)
    patches = [line.split(" -p ")[1] for line in person.asked.read_text().splitlines()]
    assert [json.loads(patch)["spec"] for patch in patches] == [{"suspend": True}, {"suspend": False}]
    with pytest.raises(FencedError):
        writer.void(claim, "late", "9/0-x")
    goes_on(person.root, 5)


def goes_on(root: Path, step: int) -> None:
    """Check that a start goes on from `step`, bit for bit, and saves."""
    state = state_at(0)
    with open_manager(root.as_uri()) as manager:
        result = manager.restore(state)
        assert result is not None
        assert (result.step, state["n"]) == (step, step)
        assert torch.equal(state["w"], torch.full((300,), float(step)))
        manager.save(step + 1, state_at(step + 1)).result()
        assert manager.steps()[-1] == step + 1


def test_a_copy_that_is_put_back_loses_nothing(person: Person, whole: Path) -> None:
    damage(person.root, {7: "empty"})
    assert "BAD     log: " in person.does(FOUND)
    person.does(PUT_BACK, BACKUP=str(whole), ENTRY="00000007.json")
    person.does(CHECKED)
    assert contents(person.root).keys() == contents(whole).keys()
    goes_on(person.root, 5)


def test_a_save_that_is_not_whole_is_kept_aside_and_then_removed(person: Person) -> None:
    record = Log(open_store(person.root.as_uri())).open().commits[7]
    next((person.root / record.folder).glob("*.distcp")).unlink()
    damage(person.root, {7: "empty"})
    let_an_hour_pass(person.root)
    assert f"aside     step 5 (sequence 8) in {record.folder}" in person.does(SEEN)
    person.does(REPAIRED)
    person.does(CHECKED)
    assert (person.root / record.folder).is_dir()
    person.does(REMOVED, SEQUENCE="8")
    assert not (person.root / record.folder).exists()
    goes_on(person.root, 4)
