"""Encode the entries of the log as JSON, and decode them. Pure; their order and the rules are in `state`."""

import contextlib
import json
import re
import secrets
from dataclasses import dataclass
from typing import Any, Final

from stepkeeper.contract.wire import ContractError, decode, encode_json
from stepkeeper.errors import DamagedEntryError, LogFormatError
from stepkeeper.log.records import ForeignBase, Index, ManifestRef, Owner, StateAfter
from stepkeeper.log.rows import decode_index, encode_index
from stepkeeper.storage.crc import crc32c

__all__ = [
    "BeginEntry",
    "Body",
    "CommitEntry",
    "DeleteEntry",
    "Entry",
    "QuarantineEntry",
    "RestoredEntry",
    "VoidEntry",
    "lost_marker",
    "new_nonce",
]

_FORMAT: Final = 3
"""The format of entries. A reader refuses any newer one: an older stepkeeper must not guess its meaning."""

_READABLE: Final = (2, _FORMAT)
"""The formats that are read. In format 2 an index may hold only the changes since an earlier one."""

_LOST: Final = "lost"
"""The kind of a marker, which is no entry: it fills a slot whose entry is gone."""

_SEALED: Final = re.compile(rb'(.*),"crc32c":([0-9]{1,10})\}', re.DOTALL)
"""Matches an entry, whose last key is the checksum of all bytes before it."""


def new_nonce() -> str:
    """Draw 128 random bits that name an entry or a save. No other process can have drawn the same."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginEntry:
    """A process claims the root; HEAD is `base` from here on, unless this begins a branch."""

    base: int | None = None
    """The slot of the commit that it continues from. None: it continues from `legacy`, or from nothing."""

    legacy: ForeignBase | None = None
    """The step of another writer that it continues from, if any."""

    scratch: bool | None = None
    """True if it starts from scratch at a user's request, whatever is in the root."""

    branch: bool | None = None
    """True if its first commit begins a branch, because the process restored nothing and repeats steps that HEAD has
    passed. There is no base; HEAD stays until that commit.
    """

    owner: Owner | None = None
    """The job of the process. None: it was started by hand."""

    host: str = ""
    """The process's host, for people."""

    lost: tuple[int, ...] | None = None
    """The slots whose entries are damaged or gone, if this begin repairs the log. Its index then replaces all
    entries before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredEntry:
    """Every rank of the claim has read all of `commit`, and every block matched its manifest."""

    commit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitEntry:
    """A checkpoint is durable and complete; HEAD is this entry from here on."""

    step: int
    folder: str
    """Its path in the root."""

    size_bytes: int
    manifest: ManifestRef
    parent: int | None = None
    """The slot of the commit that was HEAD."""

    legacy: ForeignBase | None = None
    """The step of another writer that the training continued from, if there is no parent."""

    metrics: dict[str, str] | None = None
    """Metrics of the step: numbers, as Python writes them. None: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteEntry:
    """These commits are deleted; their data may be removed."""

    commits: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineEntry:
    """`commit` has bad bytes. Its data stays for inspection."""

    commit: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidEntry:
    """A save was given up; this slot will never hold its commit."""

    folder: str
    reason: str


Body = BeginEntry | RestoredEntry | CommitEntry | DeleteEntry | QuarantineEntry | VoidEntry

_KINDS: Final[dict[str, type[Body]]] = {
    "begin": BeginEntry,
    "restored": RestoredEntry,
    "commit": CommitEntry,
    "delete": DeleteEntry,
    "quarantine": QuarantineEntry,
    "void": VoidEntry,
}
_KIND_OF: Final = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of the log."""

    claim: int
    """The slot of the begin of the claim that wrote it; for a begin its own slot."""

    nonce: str
    body: Body
    after: StateAfter
    index: Index | None = None

    @property
    def kind(self) -> str:
        """The name of its kind in JSON."""
        return _KIND_OF[type(self.body)]

    def to_json(self) -> bytes:
        """Encode the entry, and seal it with its checksum."""
        envelope = {
            "format": _FORMAT,
            "kind": self.kind,
            "claim": self.claim,
            "nonce": self.nonce,
            self.kind: self.body,
            "after": self.after,
        }
        return _seal(
            encode_json(envelope if self.index is None else envelope | {"index": encode_index(self.index)})
        )

    @classmethod
    def from_json(cls, data: bytes, where: str) -> "Entry":
        """Decode an entry; `where` names its object in errors.

        Raises DamagedEntryError if no release has written this: it is empty, cut or changed; LogFormatError
        if a newer release has.
        """
        sealed = _SEALED.fullmatch(data)
        if sealed is None:
            raise _unsealed_error(data, where)
        if crc32c(sealed[1]) != int(sealed[2]):
            raise DamagedEntryError(f"{where} is not what was written: its bytes don't match its checksum")
        return cls._from_sealed(data, where)

    @classmethod
    def _from_sealed(cls, data: bytes, where: str) -> "Entry":
        try:
            raw: Any = json.loads(data)
            if raw["format"] not in _READABLE:
                raise _other_format_error(raw["format"], where)
            kind = raw["kind"]
            if kind == _LOST:
                raise DamagedEntryError(
                    f"{where} is not what was written: its entry was gone, and the slot is marked as lost"
                )
            if kind not in _KINDS:
                raise LogFormatError(f"{where} is of the unknown kind {kind!r}; known: {', '.join(_KINDS)}")
            if unknown := sorted(
                set(raw) - {"format", "kind", "claim", "nonce", "after", "index", "crc32c", kind}
            ):
                raise LogFormatError(f"{where}: unknown key {unknown[0]!r}")
            return cls(
                claim=decode(int, raw["claim"]),
                nonce=decode(str, raw["nonce"]),
                body=decode(_KINDS[kind], raw[kind]),
                after=decode(StateAfter, raw["after"]),
                index=decode_index(raw["index"]) if "index" in raw else None,
            )
        except LogFormatError:
            raise
        except (ContractError, ValueError, KeyError, TypeError) as error:
            raise LogFormatError(f"{where} is no entry of the log: {error!r}") from error


def lost_marker(nonce: str) -> bytes:
    """Encode the object by which a repair fills the slot of a lost entry, so that none can be put there."""
    return _seal(encode_json({"format": _FORMAT, "kind": _LOST, "nonce": nonce}))


def _seal(data: bytes) -> bytes:
    """Add the checksum of all bytes before it to this JSON object, as its last key."""
    return b'%b,"crc32c":%d}' % (data[:-1], crc32c(data[:-1]))


def _unsealed_error(data: bytes, where: str) -> LogFormatError:
    """Build the error for an object that doesn't end with its checksum: damage, unless it has another format."""
    with contextlib.suppress(ValueError):  # no JSON: it was cut, or is no entry at all
        raw: Any = json.loads(data)
        if isinstance(raw, dict) and isinstance(raw.get("format"), int) and raw["format"] not in _READABLE:
            return _other_format_error(raw["format"], where)
    fault = f"it doesn't end with its checksum ({len(data)} bytes)" if data else "it is empty"
    return DamagedEntryError(f"{where} is not what was written: {fault}")


def _other_format_error(found: object, where: str) -> LogFormatError:
    return LogFormatError(
        f"{where} has format {found!r}, this stepkeeper reads {_FORMAT}: use the release that wrote it, or a newer one"
    )
