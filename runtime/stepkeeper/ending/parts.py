"""Define the parts of a manager that its end uses."""

from dataclasses import dataclass

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.save.saver import Saver
from stepkeeper.training.environment import Environment
from stepkeeper.training.steps import TrainSteps

__all__ = ["EndingParts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingParts:
    """The parts of one manager."""

    steps: TrainSteps
    saver: Saver
    rank_group: RankGroup
    progress: Progress
    companion: Companion
    waits: Waits
    environment: Environment | None
    """The identity and settings from the operator; None without an operator."""

    saves_on_notice: bool
    """True if a notice makes all ranks save one step and stop."""
