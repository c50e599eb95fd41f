"""Meet the other ranks at a training's end, and agree with them on whether there is still a step to save."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.loggers import logger

__all__ = ["EndAgreement", "EndChoice", "EndOfRank", "judge_last_step"]

_log: Final = logger("stepkeeper")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfRank:
    """The last step of one rank, at the training's end."""

    step: int | None
    """The last finished step, if it isn't saved; None if there is nothing to save."""

    changed: bool
    """True if the state isn't that of the step any more."""

    stops: bool = False
    """True if the program has ended itself because of a notice: training isn't done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndChoice:
    """The choice of what all ranks do at the training's end."""

    saves: bool
    """True if they save the last finished step."""

    stops: bool
    """True if a program has ended itself because of a notice: training isn't done."""


def judge_last_step(ends: Sequence[EndOfRank]) -> tuple[bool, str | None]:
    """Decide whether all ranks save their last step.

    Returns:
        Whether they do, and what to tell the user if that is a surprise.

    """
    steps = sorted({end.step for end in ends if end.step is not None})
    if not steps:
        return False, None
    if len(steps) > 1 or any(end.step is None for end in ends):
        listed = ", ".join(map(str, steps))
        return False, (
            f"the last step isn't saved: the ranks don't end at the same one (unsaved: {listed}). What the newest "
            "commit has is what the next start goes on from"
        )
    if any(end.changed for end in ends):
        return False, (
            f"step {steps[0]}, the last one, isn't saved: the state has changed since. Call step() after the last "
            "change of each step, or save the last step where it is finished (total_steps=)"
        )
    return True, None


class EndAgreement:
    """Let all ranks come to one choice at the training's end, and leave together."""

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group

    def agree(self, own: EndOfRank, timeout_s: float | None = None) -> EndChoice:
        """Meet all ranks, and agree on whether they save their last step.

        Args:
            own: The last step of this rank.
            timeout_s: Seconds to wait for the other ranks; by default as long as ranks may be apart.

        Raises:
            PeerLostError: A rank did not come.

        Ranks:
            All ranks call this.

        """
        return EndChoice(**self._meet("done", _choose, asdict(own), timeout_s))

    def await_saved(self) -> None:
        """Wait until all ranks have saved the last step: until then the others need this one for their commit.

        Raises:
            PeerLostError: A rank did not come.

        Ranks:
            All ranks call this.

        """
        self._meet("saved", lambda _: {}, {}, None)

    def _meet(
        self,
        name: str,
        judge: Callable[[list[dict[str, Any]]], dict[str, Any]],
        own: dict[str, Any],
        timeout_s: float | None,
    ) -> dict[str, Any]:
        """Wait for all ranks, and return what rank 0 concludes from what all say. Raises PeerLostError."""
        group = self._rank_group
        if group.world_size == 1:
            return judge([own])
        limit_s = group.limits.apart_s if timeout_s is None else timeout_s
        met = group.gather(name, own, limit_s)
        return group.broadcast(f"all-{name}", judge(met) if met else None, 2 * limit_s)


def _choose(said: list[dict[str, Any]]) -> dict[str, Any]:
    """Conclude from what all ranks have said what they do, and tell the user of a step that isn't saved."""
    ends = [EndOfRank(**each) for each in said]
    saves, complaint = judge_last_step(ends)
    if complaint is not None:
        _log.warning("%s", complaint)
    return asdict(EndChoice(saves=saves, stops=any(end.stops for end in ends)))
