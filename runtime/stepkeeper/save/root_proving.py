"""Prove the root once, before the first save of this process, and no longer than the train thread may wait."""

from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.root_check import RootProof
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import StepkeeperError
from stepkeeper.storage import Store

__all__ = ["RootProving"]


class RootProving:
    """Prove that all ranks have the same root, while the train thread waits."""

    def __init__(self, store: Store, rank_group: RankGroup, waits: Waits) -> None:
        """Prove nothing yet.

        Args:
            store: The root's store.
            rank_group: All ranks.
            waits: Ends the wait for the proof.

        """
        self._proof = RootProof(store, rank_group)
        self._waits = waits

    @property
    def is_proven(self) -> bool:
        """True once the root was proven."""
        return self._proof.made

    def prove(self, timeout_s: float | None = None) -> None:
        """Prove the root, unless that was done before.

        Another thread makes the requests, because they may take longer than a notice leaves. This one waits all the
        while: the clients of stores draw from Python's random numbers, which must stay reproducible for the training.

        Args:
            timeout_s: Seconds to wait; None waits until the proof is made or all waits end.

        Raises:
            TimeoutError: The root or another rank gave no answer within `timeout_s`.
            StorageError: The root isn't the same for all ranks, can't hold a log, or gave no answer.
            NoticeDeadlineError: The time of a notice was over before.
            PeerLostError: Another rank is lost.

        Ranks: all ranks call this.
        """
        if self.is_proven:
            return
        try:
            self._waits.run(self._proof.make, timeout_s)
        except TimeoutError as error:
            if timeout_s is None or isinstance(error, StepkeeperError):
                raise
            raise TimeoutError(
                f"the root, which was not written to before, or another rank gave no answer for {timeout_s:.1f} s"
            ) from error
