"""Compare the copies that ranks hold while training waits, so that they are copied as the ranks then decide."""

from collections.abc import Callable
from functools import partial
from typing import Final

from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import SaveError
from stepkeeper.loggers import logger
from stepkeeper.save.consistency import check_same_state
from stepkeeper_planners.errors import RanksDifferError
from stepkeeper_planners.saving.copy_comparison import HeldDigests
from stepkeeper_planners.saving.differing_copies import CopyVerdict

__all__ = ["FirstComparison"]

_log: Final = logger(__name__)


class FirstComparison:
    """Compare the copies before one save, on one rank."""

    def __init__(
        self, name: str, step: int, rank_group: RankGroup, waits: Waits, *, reads_devices: bool
    ) -> None:
        """Compare nothing yet.

        Args:
            name: The ranks' name for this comparison.
            step: The step to save.
            rank_group: All ranks.
            waits: Ends the wait for other ranks.
            reads_devices: True to wait for the digests of XLA devices. If not, and if there are such, nothing is
                compared here: training mustn't wait for the devices.

        """
        self._name: Final = name
        self._step: Final = step
        self._rank_group: Final = rank_group
        self._waits: Final = waits
        self._reads_devices: Final = reads_devices
        self.is_over = False
        """True once no other rank waits for this one to compare."""

        self.failure: BaseException | None = None
        """The error of the comparison that all ranks raise."""

    def __call__(
        self, held: HeldDigests, start_digests: Callable[[], Callable[[], dict[str, str]]] | None
    ) -> CopyVerdict | None:
        """Compare the copies.

        Ranks: all ranks call this.

        Args:
            held: The digests of this rank's copies.
            start_digests: Starts the digests of XLA devices, and returns the function that waits for them.

        Returns:
            The verdict if the first rank's copies are to be saved; None if all are equal, or weren't compared.

        Raises:
            RanksDifferError: The save is refused. All ranks raise it.
            SaveError: Another rank has no snapshot. All ranks raise it.
            StepkeeperError: A rank is lost, or a notice's deadline has come.

        """
        if start_digests is not None:
            if not self._reads_devices:
                self.is_over = True
                return None
            held.digests.add_digests(start_digests()())
        self.is_over = True
        verdict = self._waits.run(partial(self._compare, held))
        if verdict is not None and self._rank_group.rank == 0:
            _log.warning("step %d: %s", self._step, verdict.warn(), extra={"step": self._step})
        return verdict

    def _compare(self, held: HeldDigests) -> CopyVerdict | None:
        try:
            with self._rank_group.heartbeat():
                verdict = check_same_state(self._name, self._step, None, self._rank_group, copies=held)
            if verdict is not None:
                verdict.raise_refusal()
        except (RanksDifferError, SaveError) as error:
            self.failure = error
            raise
        return verdict
