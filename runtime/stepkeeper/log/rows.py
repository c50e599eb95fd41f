"""Encode indexes as JSON and decode them. An index may have very many commits: each is a row. Pure."""

from typing import Any, Final

from stepkeeper.contract.wire import ContractError, decode, encode
from stepkeeper.log.records import CommitRecord, ForeignBase, Index, ManifestRef, Owner

__all__ = ["decode_index", "encode_index"]

_KEYS: Final = frozenset({"base", "branching", "commits", "gone", "host", "legacy", "owner", "owners"})
"""The keys of an index. Only format 2 has `base` and `gone`."""

_MORE: Final[dict[str, Any]] = {
    "legacy": ForeignBase,
    "metrics": dict[str, str],
    "quarantined": bool,
    "verified": bool,
}
"""What a row has only if it isn't the default."""

_WIDTH: Final = 9
"""The number of fields that every row has."""

_MAX_INT: Final = 2**53


def encode_index(index: Index) -> dict[str, Any]:
    """Convert a whole index into plain JSON types."""
    found = {
        "branching": index.branching,
        "commits": [_row(record) for record in index.commits],
        "host": index.host or None,
        "legacy": index.legacy,
        "owner": index.owner,
        "owners": index.owners or None,
    }
    return {key: encode(value) for key, value in found.items() if value is not None}


def decode_index(raw: object) -> Index:
    """Convert plain JSON types into an index. Raises ContractError."""
    if not isinstance(raw, dict) or not set(raw) <= _KEYS or not isinstance(raw.get("commits"), list):
        raise ContractError(f"Index: expected an object with {', '.join(sorted(_KEYS))}")
    return Index(
        base=decode(int, raw["base"]["slot"]) if "base" in raw else None,
        commits=tuple(map(_record, raw["commits"])),
        owners=decode(tuple[Owner, ...], raw.get("owners", [])),
        owner=decode(Owner, raw["owner"]) if "owner" in raw else None,
        host=decode(str, raw.get("host", "")),
        legacy=decode(ForeignBase, raw["legacy"]) if "legacy" in raw else None,
        branching=decode(bool, raw["branching"]) if "branching" in raw else None,
    )


def _row(record: CommitRecord) -> list[Any]:
    manifest = record.manifest
    row = [
        record.slot, record.claim, record.step, record.folder, record.size_bytes,
        manifest.path, manifest.size_bytes, manifest.crc32c, record.parent,
    ]  # fmt: skip
    more = {
        "legacy": record.legacy,
        "metrics": record.metrics,
        "quarantined": record.quarantined or None,
        "verified": record.verified or None,
    }
    rest = {key: encode(value) for key, value in more.items() if value is not None}
    return [*row, rest] if rest else row


def _record(row: object) -> CommitRecord:
    if not isinstance(row, list) or len(row) not in (_WIDTH, _WIDTH + 1):
        raise ContractError(f"Index.commits: expected rows of {_WIDTH} or {_WIDTH + 1}, got {row!r}")
    slot, claim, step, folder, size_bytes, path, manifest_bytes, crc, parent, *rest = row
    for number in (slot, claim, step, size_bytes, manifest_bytes, crc, 0 if parent is None else parent):
        if type(number) is not int or not 0 <= number <= _MAX_INT:
            raise ContractError(f"Index.commits: {number!r} is no whole number")
    return CommitRecord(
        slot=slot,
        claim=claim,
        step=step,
        folder=decode(str, folder),
        size_bytes=size_bytes,
        manifest=ManifestRef(path=decode(str, path), size_bytes=manifest_bytes, crc32c=crc),
        parent=parent,
        **(_more(rest[0]) if rest else {}),
    )


def _more(raw: object) -> dict[str, Any]:
    if not isinstance(raw, dict) or not set(raw) <= set(_MORE):
        raise ContractError(f"Index.commits: expected an object with {', '.join(sorted(_MORE))}, got {raw!r}")
    return {key: decode(_MORE[key], value) for key, value in raw.items()}
