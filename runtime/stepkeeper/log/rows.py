"""Encode indexes as JSON and decode them. An index of a long log has very many commits: each is a row. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, Final, TypeVar

from stepkeeper.contract.wire import ContractError, decode, encode
from stepkeeper.log.records import CommitRecord, ForeignBase, Index, IndexRef, ManifestRef, Owner

__all__ = ["decode_index", "encode_index"]

_Value = TypeVar("_Value")

_KEYS: Final = frozenset({"base", "branching", "commits", "gone", "host", "legacy", "owner", "owners"})
_MORE: Final[Mapping[str, tuple[Any, Any]]] = {
    "legacy": (ForeignBase, None),
    "metrics": (dict[str, str], None),
    "quarantined": (bool, False),
    "verified": (bool, False),
}
"""What a row has only if it isn't the default: its type and that."""

_WIDTH: Final = 9
_WIDTHS: Final = (_WIDTH, _WIDTH + 1)
_MAX_INT: Final = 2**53


def encode_index(index: Index) -> dict[str, Any]:
    """Convert an index into plain JSON types."""
    found = {
        "base": index.base,
        "branching": index.branching,
        "commits": [_row(record) for record in index.commits],
        "gone": [list(span) for span in index.gone] or None,
        "host": index.host or None,
        "legacy": index.legacy,
        "owner": index.owner,
        "owners": index.owners or None,
    }
    return {key: encode(value) for key, value in found.items() if value is not None}


def decode_index(raw: object) -> Index:
    """Convert plain JSON types into an index. Raises ContractError."""
    if not isinstance(raw, dict) or not set(raw) <= _KEYS:
        raise ContractError(f"Index: expected an object with {', '.join(sorted(_KEYS))}")
    return Index(
        base=decode(IndexRef, raw["base"]) if "base" in raw else None,
        commits=_records(_list(raw["commits"])),
        gone=tuple(map(_span, _list(raw.get("gone", [])))),
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


def _records(rows: list[Any]) -> tuple[CommitRecord, ...]:
    """Decode rows column by column: one at a time, those of a long log take several times as long."""
    for row in rows:
        if not isinstance(row, list) or len(row) not in _WIDTHS:
            raise ContractError(f"Index.commits: expected rows of {_WIDTHS}, got {row!r}")
    slots, claims, steps, folders, sizes, paths, manifest_sizes, crcs, parents = (
        [row[place] for row in rows] for place in range(_WIDTH)
    )
    manifests = _made(
        ManifestRef,
        len(rows),
        path=_texts(paths),
        size_bytes=_numbers(manifest_sizes),
        crc32c=_numbers(crcs),
    )
    return _made(
        CommitRecord,
        len(rows),
        slot=_numbers(slots),
        claim=_numbers(claims),
        step=_numbers(steps),
        folder=_texts(folders),
        size_bytes=_numbers(sizes),
        manifest=manifests,
        parent=_numbers(parents, or_none=True),
        **_more_columns(rows),
    )


def _more_columns(rows: Sequence[list[Any]]) -> dict[str, Iterable[Any]]:
    """Decode what most rows leave out."""
    if all(len(row) == _WIDTH for row in rows):
        return {key: repeat(default) for key, (_, default) in _MORE.items()}
    found = [_more(row[_WIDTH]) if len(row) > _WIDTH else {} for row in rows]
    return {key: [each.get(key, default) for each in found] for key, (_, default) in _MORE.items()}


def _more(raw: object) -> Mapping[str, Any]:
    if not isinstance(raw, dict) or not set(raw) <= set(_MORE):
        raise ContractError(f"Index.commits: expected an object with {', '.join(sorted(_MORE))}, got {raw!r}")
    return {key: decode(_MORE[key][0], value) for key, value in raw.items()}


def _made(kind: type[_Value], count: int, **columns: Iterable[object]) -> tuple[_Value, ...]:
    """Make frozen values of columns, one for each field. The constructor would run Python's code for every value."""
    made = tuple(map(kind.__new__, repeat(kind, count)))
    for name, column in columns.items():
        deque(map(getattr(kind, name).__set__, made, column), maxlen=0)
    return made


def _numbers(column: Sequence[Any], *, or_none: bool = False) -> Sequence[int | None]:
    known = [each for each in column if each is not None] if or_none else column
    if known and (set(map(type, known)) != {int} or min(known) < 0 or max(known) > _MAX_INT):
        bad = next(each for each in known if type(each) is not int or not 0 <= each <= _MAX_INT)
        raise ContractError(f"Index.commits: {bad!r} is no whole number")
    return column


def _texts(column: Sequence[Any]) -> Sequence[str]:
    # Most are ASCII, for which this is all that there is to check.
    if set(map(type, column)) == {str} and all(map(str.isascii, column)):
        return column
    return [decode(str, each) for each in column]


def _list(raw: object) -> list[Any]:
    if not isinstance(raw, list):
        raise ContractError(f"Index: expected a list, got {type(raw).__name__}")
    return raw


def _span(raw: object) -> tuple[int, int]:
    first, last = decode(tuple[int, ...], raw)
    if first > last:
        raise ContractError(f"Index.gone: {first} is after {last}")
    return first, last
