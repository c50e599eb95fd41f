"""Plan saves and loads for torch.distributed.checkpoint: write each shard once, and read it onto any layout."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stepkeeper_planners.geometry.layout import Ranks
    from stepkeeper_planners.loading.planner import SPMDLoadPlanner
    from stepkeeper_planners.loading.safe_readers import SafeFileSystemReader, SafeFsspecReader, SafeMetadata
    from stepkeeper_planners.saving.planner import SPMDSavePlanner
    from stepkeeper_planners.saving.staging import SPMDStager
    from stepkeeper_planners.state.per_rank import PerRank
    from stepkeeper_planners.state.priming import prime_optimizer
    from stepkeeper_planners.state.random_state import RandomState
    from stepkeeper_planners.state.whole import Whole

__all__ = [
    "PerRank",
    "RandomState",
    "Ranks",
    "SPMDLoadPlanner",
    "SPMDSavePlanner",
    "SPMDStager",
    "SafeFileSystemReader",
    "SafeFsspecReader",
    "SafeMetadata",
    "Whole",
    "prime_optimizer",
]

_HOMES: Final = {
    "PerRank": "state.per_rank",
    "RandomState": "state.random_state",
    "Ranks": "geometry.layout",
    "SPMDLoadPlanner": "loading.planner",
    "SPMDSavePlanner": "saving.planner",
    "SPMDStager": "saving.staging",
    "SafeFileSystemReader": "loading.safe_readers",
    "SafeFsspecReader": "loading.safe_readers",
    "SafeMetadata": "loading.safe_readers",
    "Whole": "state.whole",
    "prime_optimizer": "state.priming",
}


def __getattr__(name: str) -> Any:
    # The planners import all of torch.distributed.checkpoint, most other modules very little of it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
