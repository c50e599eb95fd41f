"""Compare the copies that ranks hold while training waits, so that they are copied as the ranks then decide."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import SaveError
from stepkeeper.loggers import logger
from stepkeeper.save.consistency import check_same_state
from stepkeeper_planners.errors import RanksDifferError
from stepkeeper_planners.saving.copies import CopyDigests
from stepkeeper_planners.saving.differing_copies import Answer, CopyVerdict, compare_copies
from stepkeeper_planners.state.tree import FlatState

__all__ = ["FirstComparison"]

_log: Final = logger(__name__)


class FirstComparison:
    """Compare the copies before one save, on one rank."""

    def __init__(
        self, name: str, step: int, rank_group: RankGroup, waits: Waits, *, reads_devices: bool
    ) -> None:
        """Compare nothing yet. `reads_devices`: training may wait for the digests of XLA devices."""
        self.name = name
        """The ranks' name for what they exchange next."""

        self.reads_devices: Final = reads_devices
        self.failure: BaseException | None = None
        """The error of the comparison that all ranks raise."""

        self._step: Final = step
        self._rank_group: Final = rank_group
        self._waits: Final = waits

    def __call__(
        self, digests: CopyDigests, names: Callable[[], dict[str, bytes]], flat: FlatState
    ) -> CopyVerdict | None:
        """Compare this rank's copies with those of the others, as all ranks do until they find no difference.

        `names` computes the digests of the names and values.
        Returns the verdict if the first rank's copies are to be saved; None if all are equal. Raises
        RanksDifferError if the save is refused, and SaveError if another rank has no snapshot, on all ranks;
        PeerLostError and NoticeDeadlineError.
        """
        name, self.name = self.name, f"{self.name}/compared"
        verdict = self._waits.run(partial(self._compare, name, digests, names, flat))
        if verdict is not None and self._rank_group.rank == 0:
            _log.warning("step %d: %s", self._step, verdict, extra={"step": self._step})
        return verdict

    def _compare(
        self, name: str, digests: CopyDigests, names: Callable[[], dict[str, bytes]], flat: FlatState
    ) -> CopyVerdict | None:
        group = self._rank_group
        limit_s = group.limits.apart_s

        def exchange(part: str, value: Mapping[str, Any], answer: Answer) -> Mapping[str, Any]:
            values = group.gather(f"{name}/{part}", value, limit_s)
            return group.broadcast(f"{name}/{part}-all", answer(values) if values else None, 2 * limit_s)

        try:
            with group.heartbeat():
                differing = check_same_state(name, self._step, names, group, copies=digests, is_first=True)
                return compare_copies(differing, digests, flat, group.rank, exchange)
        except (RanksDifferError, SaveError) as error:
            self.failure = error
            raise
