"""How much of a state is copied on its devices, when that is given, and when it has to be found out."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
from typing_extensions import override

from stepkeeper.errors import DevicesFullError, SaveError
from stepkeeper.snapshot import device

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
    def _dispatched(self, tensors: Any, cuts: Any, fqns: Sequence[str]) -> Any:
        self.asked.append(list(fqns))
        if sum(cuts[fqn].device_bytes for fqn in fqns) > self.room_bytes:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")
        return list(fqns)

    @override
    def _refuse_to_guess(self) -> None:
        return

    @override
    def make(self, *arguments: Any) -> Any:
        """Those copies leave at once, unless they are kept."""
        made, rest = super().make(*arguments)
        if made and not self.kept:
            self.left()
        return made, rest


@pytest.mark.parametrize(
    ("budget_mib", "copied"),
    [(0, []), (99, []), (100, ["a"]), (500, ["a", "b"]), (700, ["b", "c"]), (1000, NAMES), (10**6, NAMES)],
)
def test_a_budget_is_kept_and_used_for_large_tensors_first(budget_mib: int, copied: list[str]) -> None:
    made, rest = Devices(budget_mib * MIB, 2**60).make({}, CUTS, NAMES)
    assert cast(Any, made) == copied
    assert sorted([*copied, *rest]) == NAMES


def test_room_is_found_out_by_halves_and_remembered() -> None:
    devices = Devices(None, 450 * MIB)
    made, rest = devices.make({}, CUTS, NAMES)
    # 1000 MiB, then at most 500: a and b, which is still too much, then at most 250.
    assert devices.asked == [NAMES, ["a", "b"], ["d"]]
    assert cast(Any, made) == ["d"]
    assert rest == ["a", "b", "c"]
    devices.make({}, CUTS, NAMES)
    assert devices.asked[3:] == [["d"]]


def test_without_any_room_nothing_is_tried_any_more() -> None:
    devices = Devices(None, 0)
    assert devices.make({}, CUTS, NAMES) == ([], NAMES)
    assert devices.limit_bytes == 0


def test_a_copy_that_fails_behind_the_training_lowers_what_the_next_save_tries() -> None:
    devices = Devices(None, 2**60)
    with pytest.raises(DevicesFullError, match="from the next one on 524288000 bytes"):
        devices.refused(RuntimeError("RESOURCE_EXHAUSTED"), CUTS, NAMES)
    assert devices.limit_bytes == 500 * MIB
    devices.refused(RuntimeError("the program was cancelled"), CUTS, NAMES)
    assert devices.limit_bytes == 500 * MIB


def test_one_process_of_many_does_not_learn_alone_what_its_devices_have_room_for() -> None:
    """The others would start another program."""

    class OneOfMany(Devices):
        @override
        def _refuse_to_guess(self) -> None:
            raise SaveError("give device_budget_bytes")

    devices = OneOfMany(None, 2**60)
    with pytest.raises(SaveError, match="device_budget_bytes") as raised:
        devices.refused(RuntimeError("RESOURCE_EXHAUSTED"), CUTS, NAMES)
    assert not raised.value.next_save_mends
    assert devices.limit_bytes is None


def test_copies_that_are_still_there_are_waited_for_where_there_is_a_budget() -> None:
    devices = Devices(500 * MIB, 2**60)
    devices.kept = True
    devices.make({}, CUTS, NAMES)
    asked_again = threading.Thread(target=devices.make, args=({}, CUTS, NAMES), daemon=True)
    asked_again.start()
    asked_again.join(0.05)
    assert len(devices.asked) == 1
    devices.left()
    asked_again.join(10)
    assert len(devices.asked) == 2


def test_a_given_budget_that_is_too_large_is_said_so() -> None:
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        Devices(1000 * MIB, 450 * MIB).make({}, CUTS, NAMES)


def test_another_failure_is_no_lack_of_room() -> None:
    class Broken(Devices):
        @override
        def _dispatched(self, tensors: Any, cuts: Any, fqns: Sequence[str]) -> Any:
            raise RuntimeError("INVALID_ARGUMENT")

    devices = Broken(None, 2**60)
    with pytest.raises(RuntimeError, match="INVALID_ARGUMENT"):
        devices.make({}, CUTS, NAMES)
    assert devices.limit_bytes is None


def test_small_pieces_are_moved_together_and_large_ones_alone() -> None:
    sizes = [6, 6, 6, 16, 1, 1]
    pieces = cast(Any, [Size(0, size * MIB) for size in sizes])
    together = [[piece.size_bytes // MIB for piece in batch] for batch in device.batches(pieces)]
    assert together == [[6, 6], [6], [16], [1, 1]]
