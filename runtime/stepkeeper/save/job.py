"""One save of one rank, from its snapshot on, and the place that the ranks have agreed on for it."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Self

from stepkeeper.checkpoint.manifest import checkpoint_folder
from stepkeeper.companion.supervisor import Origin
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.snapshot.region import Region
from stepkeeper.save.snapshot.take import Snapshot

__all__ = ["Place", "SaveJob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """One save from its snapshot on. It no longer refers to the state."""

    name: str
    """The ranks' name for this save."""

    in_flight: InFlight
    """Updated as the save proceeds."""

    origin: Origin | None
    """The commit that the state was restored from, if it was. If this save claims the root, the claim continues from
    there.
    """

    is_continued: bool
    """True if this process has restored all that it saves. If not, the save may begin a branch."""

    snapshot: Snapshot
    region: Region
    transfer: Future[None]
    """Resolved when the whole snapshot is in the region, or with the error of its transfer."""

    release_region: Callable[[], None] = lambda: None
    """Called when the region is no longer needed, if that is before the end of the save."""

    metrics: Mapping[str, str] = field(default_factory=dict)
    """The training's metrics of the step, as numbers in text."""

    note_moved: Callable[[int], None] = lambda _n_bytes: None
    """Called with the number of bytes moved since the last call, which shows progress to waiting ranks."""

    is_last: bool = False
    """True if no save comes after this one: see `SaveRequest`."""

    @property
    def step(self) -> int:
        return self.in_flight.step

    def noting_moved(self, report: Callable[[int], None]) -> Self:
        """Return the same save, which also reports how many bytes were moved."""

        def note(n_bytes: int) -> None:
            self.note_moved(n_bytes)
            report(n_bytes)

        return replace(self, note_moved=note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The claim and the nonce that name the folder of one save."""

    claim: int
    nonce: str

    def folder(self, step: int) -> str:
        return checkpoint_folder(step, self.claim, self.nonce)
