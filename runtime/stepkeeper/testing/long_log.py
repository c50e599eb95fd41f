"""Make the log of a training that keeps all of its commits, without appending each of them."""

import secrets
from collections.abc import Iterator

from stepkeeper.log import BeginEntry, CommitEntry, CommitRecord, Entry, ManifestRef
from stepkeeper.log.indexes import base_slot, is_indexed
from stepkeeper.log.records import Index, IndexRef, StateAfter
from stepkeeper.log.tail import slot_path

__all__ = ["long_log"]


def long_log(n_commits: int) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each object of a log with one claim, by hand, and `n_commits` commits.

    They are what the log's own code would have appended, but for the nonces.
    """
    nonces = [secrets.token_hex(16)]
    records: list[CommitRecord] = []
    index = 0
    for slot in range(n_commits + 1):
        if slot:
            records.append(_record(slot))
            nonces.append(secrets.token_hex(16))
        body = _commit(records[-1]) if slot else BeginEntry()
        indexed = is_indexed(slot, body)
        index = slot if indexed else index
        yield (
            slot_path(slot),
            Entry(
                claim=0,
                nonce=nonces[slot],
                body=body,
                after=StateAfter(root=nonces[0], claim=0, index=index, head=slot or None),
                index=_index(slot, records, nonces) if indexed else None,
            ).to_json(),
        )


def _record(slot: int) -> CommitRecord:
    return CommitRecord(
        slot=slot,
        claim=0,
        step=1000 * slot,
        folder=f"{1000 * slot}/0-{secrets.token_hex(16)}",
        size_bytes=36_061_162,
        manifest=ManifestRef(path="manifest.0.json", size_bytes=5096, crc32c=secrets.randbits(32)),
        parent=slot - 1 or None,
    )


def _commit(record: CommitRecord) -> CommitEntry:
    return CommitEntry(
        step=record.step,
        folder=record.folder,
        size_bytes=record.size_bytes,
        manifest=record.manifest,
        parent=record.parent,
    )


def _index(slot: int, records: list[CommitRecord], nonces: list[str]) -> Index:
    if slot == 0:
        return Index()
    base = base_slot(slot)
    return Index(base=IndexRef(slot=base, nonce=nonces[base]), commits=tuple(records[max(0, base - 1) :]))
