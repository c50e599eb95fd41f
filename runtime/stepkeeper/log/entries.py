"""Encode the entries of the log as JSON, and decode them. Pure; their order and the rules are in `state`."""

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any, Final

from stepkeeper.contract.wire import ContractError, decode, encode_json
from stepkeeper.errors import LogFormatError
from stepkeeper.log.records import ForeignBase, Index, ManifestRef, Owner, StateAfter
from stepkeeper.storage.crc import crc32c

__all__ = [
    "FORMAT",
    "BeginEntry",
    "Body",
    "CommitEntry",
    "DeleteEntry",
    "Entry",
    "QuarantineEntry",
    "RestoredEntry",
    "VoidEntry",
    "new_nonce",
]

FORMAT: Final = 1
"""The format of entries. A reader refuses any other: an older stepkeeper must not guess at what a newer one wrote."""

_SEALED: Final = re.compile(rb'(.*),"crc32c":([0-9]{1,10})\}', re.DOTALL)
"""Matches an entry, whose last key is the checksum of all bytes before it."""


def new_nonce() -> str:
    """Draw 128 random bits that name an entry or a save. No other process can have drawn the same."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginEntry:
    """A process claims the root; HEAD is `base` from here on."""

    base: int | None = None
    """The slot of the commit that it goes on from. None: it goes on from `legacy`, or from nothing."""

    legacy: ForeignBase | None = None
    """The step of another writer that it goes on from, if it goes on from one."""

    scratch: bool | None = None
    """True if it goes on from nothing, whatever is in the root, because somebody has asked for that."""

    owner: Owner | None = None
    """The job of the process. None: it was started by hand."""

    host: str = ""
    """The process's host, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredEntry:
    """Every rank of the claim has read `commit` whole, and every block was as its manifest says."""

    commit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitEntry:
    """A checkpoint is durable and whole; HEAD is this entry from here on."""

    step: int
    folder: str
    """Its path in the root."""

    size_bytes: int
    manifest: ManifestRef
    parent: int | None = None
    """The slot of the commit that was HEAD."""

    legacy: ForeignBase | None = None
    """The step of another writer that the training had gone on from, if there is no parent."""

    metrics: dict[str, str] | None = None
    """Metrics of the step: numbers, as Python writes them. None: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteEntry:
    """These commits are deleted; their data may be removed."""

    commits: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineEntry:
    """The bytes of `commit` were read bad. Its data stays for people to look at."""

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
            "format": FORMAT,
            "kind": self.kind,
            "claim": self.claim,
            "nonce": self.nonce,
            self.kind: self.body,
            "after": self.after,
        }
        data = encode_json(envelope if self.index is None else envelope | {"index": self.index})
        return b'%b,"crc32c":%d}' % (data[:-1], crc32c(data[:-1]))

    @classmethod
    def from_json(cls, data: bytes, where: str) -> "Entry":
        """Decode an entry. Raises LogFormatError that names `where`, the entry's object."""
        sealed = _SEALED.fullmatch(data)
        if sealed and crc32c(sealed[1]) != int(sealed[2]):
            raise LogFormatError(
                f"{where} is not what was written: its bytes have another checksum than it says. Put it back, from "
                "object versions or a copy"
            )
        try:
            raw: Any = json.loads(data)
            if not isinstance(raw, dict) or raw.get("format") != FORMAT:
                found = raw.get("format") if isinstance(raw, dict) else None
                raise LogFormatError(
                    f"{where} has format {found!r}, this stepkeeper knows {FORMAT}: "
                    "use the release that wrote it, or a newer one"
                )
            if not sealed:
                raise LogFormatError(f"{where} is not what was written: it doesn't end with its checksum")
            kind = raw["kind"]
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
                index=decode(Index, raw["index"]) if "index" in raw else None,
            )
        except LogFormatError:
            raise
        except (ContractError, ValueError, KeyError, TypeError) as error:
            raise LogFormatError(f"{where} is no entry of the log: {error!r}") from error
