"""Planners for torch.distributed.checkpoint: each shard of every kind of tensor written once, read onto any layout."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepkeeper_planners.loading.planner import SPMDLoadPlanner
    from stepkeeper_planners.saving.planner import SPMDSavePlanner
    from stepkeeper_planners.saving.staging import SPMDStager
    from stepkeeper_planners.state.per_rank import PerRank
    from stepkeeper_planners.state.priming import prime_optimizer

__all__ = ["PerRank", "SPMDLoadPlanner", "SPMDSavePlanner", "SPMDStager", "prime_optimizer"]


def __getattr__(name: str) -> Any:
    # The shells need all of torch.distributed.checkpoint, the core under them very little.
    if name == "PerRank":
        from stepkeeper_planners.state.per_rank import PerRank

        return PerRank
    if name == "SPMDSavePlanner":
        from stepkeeper_planners.saving.planner import SPMDSavePlanner

        return SPMDSavePlanner
    if name == "SPMDLoadPlanner":
        from stepkeeper_planners.loading.planner import SPMDLoadPlanner

        return SPMDLoadPlanner
    if name == "SPMDStager":
        from stepkeeper_planners.saving.staging import SPMDStager

        return SPMDStager
    if name == "prime_optimizer":
        from stepkeeper_planners.state.priming import prime_optimizer

        return prime_optimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
