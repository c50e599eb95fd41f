"""Hold what entries of the log are made of besides their kind: owners, manifests, commits, states."""

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
        return (self.jobset_number, self.restart_attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRef:
    """Rank 0's manifest. Everything else of the checkpoint is reached, and checked, from it."""

    path: str
    """Relative to the checkpoint's folder."""

    size_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignBase:
    """A checkpoint of another writer, stock DCP or torch_xla, that was in the root before anything was committed."""

    step: int
    folder: str
    """Relative to the root; `.metadata` is in it."""

    reason: str | None = None
    """Why it is this one and not a newer one, where such was there; for people."""


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
    """The nearest live ancestor's slot: follows deletions and quarantines."""

    legacy: ForeignBase | None = None
    """Where there is no live ancestor: what lies below all commits of this line."""

    verified: bool = False
    """Restored whole by a later claim."""

    quarantined: bool = False
    metrics: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """All that a reader needs to go on from an entry without reading any before it."""

    commits: tuple[CommitRecord, ...]
    """Live and quarantined, by slot."""

    owners: tuple[Owner, ...]
    """For each uid that ever began, its greatest ordinal; the last begin's owner is the last one."""

    owner: Owner | None = None
    """The last begin's."""

    legacy: ForeignBase | None = None
    """As in the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateAfter:
    """What every entry says about the log up to and with itself."""

    root: str
    """Nonce of slot 0: the root's identity."""

    claim: int
    """Slot of the last begin."""

    index: int
    """Slot of the newest entry that carries an index: this one, or one before."""

    head: int | None = None
