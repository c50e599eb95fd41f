"""The records in the log's entries: owners, manifests, commits, and the log's state after an entry."""

from dataclasses import dataclass

__all__ = ["CommitRecord", "ForeignBase", "Index", "ManifestRef", "Owner", "StateAfter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The job that a claim acts for."""

    name: str
    """namespace/name"""

    uid: str
    jobset_number: int
    restart_attempt: int

    @property
    def ordinal(self) -> tuple[int, int]:
        """The number of this start of the job. It grows with every start, over all JobSets of the job."""
        return (self.jobset_number, self.restart_attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRef:
    """The manifest of rank 0, from which the rest of the checkpoint is found and verified."""

    path: str
    """Its path in the checkpoint's folder."""

    size_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignBase:
    """A checkpoint of another writer, stock DCP or torch_xla, that was in the root before anything was committed."""

    step: int
    folder: str
    """Its path in the root; `.metadata` is in it."""

    reason: str | None = None
    """Why it was chosen over a newer one, if there was one; for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """A commit as later entries left it."""

    slot: int
    claim: int
    step: int
    folder: str
    size_bytes: int
    manifest: ManifestRef
    parent: int | None = None
    """The slot of the nearest live ancestor. It follows deletions and quarantines."""

    legacy: ForeignBase | None = None
    """The step of another writer that this line of commits began from, if there is no live ancestor."""

    verified: bool = False
    """True if a later claim restored all of it."""

    quarantined: bool = False
    metrics: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The state after an entry: a reader that has it needs no earlier entry.

    In format 2 most indexes hold only the changes since an earlier one, the base. These are read, not written.
    """

    base: int | None = None
    """The slot of the index that this one is based on. None: this index is whole."""

    commits: tuple[CommitRecord, ...] = ()
    """The live and quarantined commits, by slot."""

    owners: tuple[Owner, ...] = ()
    """Each owner with its greatest ordinal, in the order of their last begins."""

    owner: Owner | None = None
    """The owner of the last begin."""

    host: str = ""
    """The host of the last begin."""

    legacy: ForeignBase | None = None
    """The same as in the state."""

    branching: bool | None = None
    """The same as in the state; left out if False."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateAfter:
    """The state of the log after an entry, as every entry repeats it."""

    root: str
    """The nonce of slot 0: the root's identity."""

    claim: int
    """The slot of the last begin."""

    index: int
    """The slot of the newest entry that carries an index: this one, or one before."""

    head: int | None = None
