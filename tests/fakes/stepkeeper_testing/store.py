"""Check what every store has to do, by a pytest class: subclass it and define two fixtures."""

import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import google_crc32c
import pytest

from stepkeeper.errors import (
    DamagedEntryError,
    FencedError,
    LogGapError,
    MissingObjectError,
    ObjectExistsError,
    PinLostError,
)
from stepkeeper.log import Claim, CommitRecord, Log, ManifestRef
from stepkeeper.log.tail import slot_path
from stepkeeper.repair.repairing import carry_out, plan_repair
from stepkeeper.retention.leases import drop_over
from stepkeeper.retention.pins import is_pinned, list_pins, pin_commit, pinned_slots, renew_pin
from stepkeeper.storage.base import PagedStore, PiecewiseStore, Store
from stepkeeper_testing.checkpoints import save_small

_N_WRITERS = 64
_MIB = 1024 * 1024
_YEAR_S = 365 * 86_400.0


class StoreContract:
    """Check a store against the rules that a root needs.

    Subclasses define two fixtures: `store`, an empty root for each test, and `another`, a second client of the same
    root.
    """

    large_bytes = 20 * _MIB
    """Size of an object that is large enough for a store's way of sending large objects."""

    tells_times = True
    """False for a store whose listings don't tell when an object was put. Pins of readers that are gone stay there."""

    def test_a_put_is_read_back_and_a_second_put_loses_and_changes_nothing(
        self, store: Store, another: Store
    ) -> None:
        assert store.put_if_absent("a/b/c.json", b"first")
        assert another.read("a/b/c.json") == b"first"
        assert not another.put_if_absent("a/b/c.json", b"second")
        assert not store.put_if_absent("a/b/c.json", b"first")
        assert store.read("a/b/c.json") == b"first"

    def test_of_many_writers_of_one_name_one_wins(self, store: Store, another: Store) -> None:
        barrier = threading.Barrier(_N_WRITERS)

        def put(number: int) -> bool:
            barrier.wait()
            return (store, another)[number % 2].put_if_absent("log/00000000.json", str(number).encode())

        with ThreadPoolExecutor(_N_WRITERS) as pool:
            won = list(pool.map(put, range(_N_WRITERS)))
        assert sum(won) == 1
        assert store.read("log/00000000.json") == str(won.index(True)).encode()
        assert [stat.path for stat in store.list("log/")] == ["log/00000000.json"]

    def test_parts_are_written_joined(self, store: Store) -> None:
        store.write("1/x", [b"ab", memoryview(b"cdef")[1:3], b"", memoryview(bytearray(b"gh"))])
        assert store.read("1/x") == b"abdegh"
        store.write("1/empty", [])
        assert store.read("1/empty") == store.read("1/empty", 0, 5) == b""
        assert [stat.size_bytes for stat in store.list("1/")] == [0, 6]

    def test_a_large_object(self, store: Store) -> None:
        data = secrets.token_bytes(self.large_bytes)
        middle = self.large_bytes // 3
        store.write("1/large", [memoryview(data)[:middle], memoryview(data)[middle:]])
        assert store.read("1/large", middle - 10, 20) == data[middle - 10 : middle + 10]
        assert google_crc32c.value(store.read("1/large")) == google_crc32c.value(data)
        if isinstance(store, PiecewiseStore):
            pieces = list(store.read_pieces("1/large", middle - 10, 20, 7))
            assert [len(piece) for piece in pieces] == [7, 7, 6]
            assert b"".join(pieces) == data[middle - 10 : middle + 10]

    def test_a_write_overwrites_nothing_and_the_same_once_more_is_done_already(self, store: Store) -> None:
        store.write("1/x", [b"ab", b"c"])
        store.write("1/x", [b"abc"])
        for other in (b"abd", b"abcd"):
            with pytest.raises(ObjectExistsError, match="1/x"):
                store.write("1/x", [other])
        assert store.read("1/x") == b"abc"

    def test_many_writes_at_once(self, store: Store) -> None:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda n: store.write(f"7/0-a/{n}", [str(n).encode()] * 1000), range(48)))
        assert len(store.list("7/0-a/")) == 48
        assert store.read("7/0-a/31") == b"31" * 1000

    def test_ranges(self, store: Store) -> None:
        store.write("x", [b"0123456789"])
        places = ((3, 4), (3, None), (0, 1), (8, 100), (10, 5), (4, 0))
        assert [store.read("x", *place) for place in places] == [b"3456", b"3456789", b"0", b"89", b"", b""]

    def test_a_missing_object_is_said_to_be_missing(self, store: Store) -> None:
        store.write("a/there", [b"1"])
        for path in ("a/not", "not/at/all", "a/there/below"):
            with pytest.raises(MissingObjectError, match=path):
                store.read(path)
            with pytest.raises(MissingObjectError):
                store.read(path, 2, 2)

    def test_a_listing_is_sorted_and_knows_sizes(self, store: Store, another: Store) -> None:
        for path in ("b/2", "a/1", "b/10", "ba/1", "b/c/d"):
            store.write(path, [path.encode()])
        listed = another.list("b/")
        assert [stat.path for stat in listed] == ["b/10", "b/2", "b/c/d"]
        assert [stat.size_bytes for stat in listed] == [4, 3, 5]
        assert all(stat.crc32c in (None, google_crc32c.value(stat.path.encode())) for stat in listed)
        assert [stat.path for stat in store.list("")] == ["a/1", "b/10", "b/2", "b/c/d", "ba/1"]
        assert [stat.path for stat in store.list("b/1")] == ["b/10"]
        assert store.list("nothing/") == []

    def test_a_page_starts_at_a_name_and_is_short_only_at_the_end(self, store: Store) -> None:
        if not isinstance(store, PagedStore):
            pytest.skip("this store lists no pages")
        for number in (1, 2, 10, 3):
            store.write(f"a/{number:03d}", [b"x"])
        store.write("b/1", [b"x"])

        def page(start: str, limit: int) -> list[str]:
            return [stat.path for stat in store.list_page("a/", start, limit)]

        assert page("a/000", 2) == ["a/001", "a/002"]
        assert page("a/002", 2) == ["a/002", "a/003"]
        assert page("a/0021", 9) == ["a/003", "a/010"]
        assert page("a/010", 1) == ["a/010"]
        assert page("a/011", 9) == []
        assert store.list_page("a/", "a/010", 9)[0].size_bytes == 1

    def test_a_deleted_object_is_gone_and_deleting_again_is_fine(self, store: Store) -> None:
        store.write("5/0-a/x", [b"1"])
        store.write("5/0-b/x", [b"1"])
        store.delete("5/0-a/x")
        store.delete("5/0-a/x")
        assert [stat.path for stat in store.list("")] == ["5/0-b/x"]
        store.write("5/0-a/x", [b"2"])
        assert store.read("5/0-a/x") == b"2"

    def test_a_listing_tells_when_objects_were_put(self, store: Store, another: Store) -> None:
        store.put_if_absent("a/1", b"first")
        put_s = {stat.path: stat.time_unix_s for stat in another.list("a/")}
        if not self.tells_times:
            assert put_s == {"a/1": None}
            return
        another.put_if_absent("a/1", b"second")
        another.write("a/2", [b"x"])
        later_s = {stat.path: stat.time_unix_s for stat in store.list("a/")}
        assert later_s["a/1"] is not None, "this store tells no times: set tells_times to False"
        assert later_s["a/1"] == put_s["a/1"], "a put that loses changes nothing"
        assert later_s["a/2"] is not None
        # A store may count in whole seconds.
        assert later_s["a/2"] >= later_s["a/1"] - 1
        # No clock of a store is a year off.
        assert abs(later_s["a/1"] - time.time()) < _YEAR_S

    def test_a_pin_is_renewed_listed_and_removed(self, store: Store, another: Store) -> None:
        """Readers of other hosts keep data from deletion by such objects."""
        log = Log(store)
        claim = log.begin()
        record = _commit(log, claim, 1)
        readers = Log(another)
        pin, _ = pin_commit(readers, another, lambda state: state.live_commit(record.slot), holder="a reader")
        assert pin is not None
        assert pinned_slots(store) == {record.slot}
        for step in (2, 3, 4):
            _commit(log, claim, step)
        renewed = renew_pin(readers, another, pin)
        assert drop_over(store, lambda seen: seen != renewed.seen).slots == {record.slot}
        assert list_pins(store) == [renewed]
        assert drop_over(store, lambda seen: seen == renewed.seen).slots == frozenset()
        assert list_pins(another) == []
        assert not is_pinned(another, renewed)
        _commit(log, claim, 5)
        with pytest.raises(PinLostError):
            renew_pin(readers, another, renewed)
        assert list_pins(store) == []

    @pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/.", "a\n", "ä", ".tmp-1"])
    def test_a_path_that_could_leave_the_root_is_refused(self, store: Store, path: str) -> None:
        with pytest.raises(ValueError, match="is no object path"):
            store.write(path, [b"1"])

    def test_a_log_lives_on_it(self, store: Store, another: Store) -> None:
        first, second = Log(store), Log(another)
        claim = first.begin()
        first.void(claim, "nothing to save", "10/0-x")
        later = second.begin()
        assert first.refresh() == second.state
        assert (claim.slot, later.slot, first.state.tail) == (0, 2, 2)

    @pytest.mark.parametrize("how", ["flipped", "cut", "empty", "gone"])
    def test_a_damaged_log_on_it_is_repaired(self, store: Store, another: Store, how: str) -> None:
        log = Log(store)
        claim = log.begin()
        first = save_small(log, store, claim, 10)
        second = save_small(log, store, claim, 20)
        path = slot_path(first.slot)
        data = store.read(path)
        flipped = bytes([data[0] ^ 1]) + data[1:]
        damaged = {"flipped": flipped, "cut": data[: len(data) // 2], "empty": b""}
        store.delete(path)
        if how != "gone":
            assert store.put_if_absent(path, damaged[how])
        with pytest.raises((LogGapError, DamagedEntryError), match="stepkeeper repair"):
            Log(another).open()
        plan = plan_repair(another)
        carry_out(another, Log(another), plan, "a test")
        state = Log(store).open()
        assert (tuple(state.commits.values()), state.head) == ((first, second), second.slot)
        with pytest.raises(FencedError):
            log.void(claim, "nothing to save", "30/0-x")
        if how != "gone":
            assert store.read(path) == damaged[how]


def _commit(log: Log, claim: Claim, step: int) -> CommitRecord:
    manifest = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=1)
    return log.commit(claim, step=step, folder=f"{step}/0-{step:032x}", size_bytes=1, manifest=manifest)
