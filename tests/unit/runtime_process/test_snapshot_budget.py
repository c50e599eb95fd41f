"""Test how much of a state is copied on its devices: where that is given, and where it has to be found out."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typing_extensions import override

from stepkeeper.errors import DevicesFullError, SaveError
from stepkeeper.save.snapshot import device
from stepkeeper_planners import adapters

MIB = 1024 * 1024
NAMES = ["a", "b", "c", "d"]


@dataclass
class Size:
    """All of a Cut that is looked at here."""

    device_bytes: int
    size_bytes: int = 0


CUTS: Any = {name: Size(size * MIB) for name, size in zip(NAMES, (100, 400, 300, 200), strict=True)}


class Devices(device.DeviceCopies):
    """Devices with so much room."""

    def __init__(self, budget_bytes: int | None, room_bytes: int) -> None:
        super().__init__(budget_bytes)
        self.room_bytes = room_bytes
        self.kept = False
        self.asked: list[list[str]] = []

    @override
    def _dispatch_copies(self, tensors: Any, clones: Any, fqns: Sequence[str]) -> Any:
        self.asked.append(list(fqns))
        if sum(clones[fqn].device_bytes for fqn in fqns) > self.room_bytes:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")
        return list(fqns)

    @override
    def make_copies(self, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Those copies leave at once, unless they are kept."""
        made, rest = super().make_copies(*arguments, timeout_s=timeout_s)
        if made and not self.kept:
            self.release_copies()
        return made, rest


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(is_multi_process_program=lambda: False)
    monkeypatch.setattr(adapters, "xla_pieces", alone, raising=False)


@pytest.mark.parametrize(
    ("budget_mib", "copied"),
    [(0, []), (99, []), (100, ["a"]), (500, ["a", "b"]), (700, ["b", "c"]), (1000, NAMES), (10**6, NAMES)],
)
def test_a_budget_is_kept_and_used_for_large_tensors_first(budget_mib: int, copied: list[str]) -> None:
    made, rest = Devices(budget_mib * MIB, 2**60).make_copies({}, CUTS, NAMES)
    assert cast(Any, made) == copied
    assert sorted([*copied, *rest]) == NAMES


def test_room_is_found_out_by_halves_and_remembered() -> None:
    devices = Devices(None, 450 * MIB)
    made, rest = devices.make_copies({}, CUTS, NAMES)
    # 1000 MiB, then at most 500: a and b, which is still too much, then at most 250.
    assert devices.asked == [NAMES, ["a", "b"], ["d"]]
    assert cast(Any, made) == ["d"]
    assert rest == ["a", "b", "c"]
    devices.make_copies({}, CUTS, NAMES)
    assert devices.asked[3:] == [["d"]]


def test_a_copy_that_fails_behind_the_training_lowers_what_the_next_save_tries() -> None:
    devices = Devices(None, 2**60)
    with pytest.raises(DevicesFullError, match="from the next one on 524288000 bytes"):
        devices.handle_refusal(RuntimeError("RESOURCE_EXHAUSTED"), CUTS, NAMES)
    assert devices.limit_bytes == 500 * MIB
    devices.handle_refusal(RuntimeError("the program was cancelled"), CUTS, NAMES)
    assert devices.limit_bytes == 500 * MIB


def test_one_process_of_many_does_not_learn_alone_what_its_devices_have_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others would start another program."""
    many = SimpleNamespace(is_multi_process_program=lambda: True)
    monkeypatch.setattr(adapters, "xla_pieces", many, raising=False)
    devices = Devices(None, 450 * MIB)
    with pytest.raises(SaveError, match="device_budget_bytes, the same on all ranks") as raised:
        devices.handle_refusal(RuntimeError("RESOURCE_EXHAUSTED"), CUTS, NAMES)
    assert not raised.value.next_save_mends
    with pytest.raises(SaveError, match="device_budget_bytes, the same on all ranks"):
        devices.make_copies({}, CUTS, NAMES)
    assert devices.limit_bytes is None


class Leaving(threading.Condition):
    """The copies leave while they are waited for, or don't."""

    def __init__(self, devices: Devices | None) -> None:
        super().__init__()
        self.devices = devices
        self.waited_s: list[float | None] = []

    @override
    def wait_for(self, predicate: Any, timeout: float | None = None) -> Any:
        self.waited_s.append(timeout)
        if self.devices is None or predicate():
            return predicate()
        self.devices.release_copies()
        return super().wait_for(predicate, 0)


def test_copies_that_do_not_leave_in_time_are_no_reason_to_wait_longer() -> None:
    devices = Devices(500 * MIB, 2**60)
    devices.kept = True
    devices.make_copies({}, CUTS, NAMES)
    vars(devices)["_changed"] = Leaving(None)
    with pytest.raises(TimeoutError, match=r"after 7\.0 s"):
        devices.make_copies({}, CUTS, NAMES, timeout_s=7)
    with pytest.raises(SaveError, match="still on the devices"):
        devices.make_copies({}, CUTS, NAMES)
    assert len(devices.asked) == 1


def test_a_given_budget_that_is_too_large_is_said_so() -> None:
    devices = Devices(1000 * MIB, 450 * MIB)
    with pytest.raises(SaveError, match=r"1048576000 bytes.*RESOURCE_EXHAUSTED.*smaller device_budget_bytes"):
        devices.make_copies({}, CUTS, NAMES)
    with pytest.raises(SaveError, match="smaller device_budget_bytes"):
        devices.handle_refusal(RuntimeError("RESOURCE_EXHAUSTED"), CUTS, NAMES)
    assert devices.limit_bytes == 1000 * MIB
