"""Indexes as rows: what is encoded is decoded as it was, and what is no row is refused."""

from typing import Any

import pytest

from stepkeeper.contract.wire import ContractError
from stepkeeper.log import CommitRecord, ManifestRef
from stepkeeper.log.records import ForeignBase, Index
from stepkeeper.log.rows import decode_index, encode_index

ROW: list[Any] = [3, 0, 30, "30/0-a", 5, "manifest.0.json", 4, 7, 2]
BAD = ((0, -1), (1, True), (2, 2**53 + 1), (3, 5), (4, None), (5, "\ud800"), (6, 1.0), (7, "7"), (8, -2))


def record(slot: int, **more: Any) -> CommitRecord:
    manifest = ManifestRef(path="manifest.0.json", size_bytes=4, crc32c=slot)
    return CommitRecord(
        slot=slot, claim=0, step=10 * slot, folder=f"{slot}/0-ä", size_bytes=5, manifest=manifest, **more
    )


@pytest.mark.parametrize(
    "records",
    [
        (),
        (record(1), record(2, parent=1)),
        (
            record(1, legacy=ForeignBase(step=1, folder="1")),
            record(2, verified=True),
            record(3, parent=2, metrics={"loss": "0.5"}),
            record(4, quarantined=True),
        ),
    ],
)
def test_rows_are_decoded_as_they_were(records: tuple[CommitRecord, ...]) -> None:
    found = decode_index(encode_index(Index(commits=records)))
    assert found == Index(commits=records)
    assert repr(found.commits) == repr(records), "all fields are there"


@pytest.mark.parametrize(
    "row",
    [
        *([*ROW[:place], value, *ROW[place + 1 :]] for place, value in BAD),
        *(ROW[:8], [*ROW, {}, 1], {"slot": 3}, [*ROW, {"metric": {}}], [*ROW, [1]]),
    ],
)
def test_what_is_no_row_is_refused(row: object) -> None:
    with pytest.raises(ContractError):
        decode_index({"commits": [ROW, row]})
