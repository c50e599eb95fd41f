"""Save checkpoints that survive preemption: `import stepkeeper as xc` replaces torch_xla's distributed_checkpoint.

The import costs nothing: each name is loaded when it is first used, and only the names that need torch load it.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

# First of all, so that it decides last at the end of the process: what is registered first is called last.
import stepkeeper.ending.fence  # noqa: F401  # see above

if TYPE_CHECKING:
    from stepkeeper import dcp, distributed
    from stepkeeper.errors import FencedError, RestoreError, SaveError, StepkeeperError, TornCheckpointError
    from stepkeeper.follower import follow
    from stepkeeper.manager import CheckpointManager
    from stepkeeper.results import RestoreResult, StepOutcome
    from stepkeeper.save.report import SaveReport
    from stepkeeper.version import __version__
    from stepkeeper_planners import (
        PerRank,
        RandomState,
        SPMDLoadPlanner,
        SPMDSavePlanner,
        Whole,
        prime_optimizer,
    )

__all__ = [
    "CheckpointManager",
    "FencedError",
    "PerRank",
    "RandomState",
    "RestoreError",
    "RestoreResult",
    "SPMDLoadPlanner",
    "SPMDSavePlanner",
    "SaveError",
    "SaveReport",
    "StepOutcome",
    "StepkeeperError",
    "TornCheckpointError",
    "Whole",
    "__version__",
    "dcp",
    "distributed",
    "follow",
    "prime_optimizer",
]

_MODULES: Final = {
    "CheckpointManager": "stepkeeper.manager",
    "FencedError": "stepkeeper.errors",
    "PerRank": "stepkeeper_planners",
    "RandomState": "stepkeeper_planners",
    "RestoreError": "stepkeeper.errors",
    "RestoreResult": "stepkeeper.results",
    "SPMDLoadPlanner": "stepkeeper_planners",
    "SPMDSavePlanner": "stepkeeper_planners",
    "SaveError": "stepkeeper.errors",
    "SaveReport": "stepkeeper.save.report",
    "StepOutcome": "stepkeeper.results",
    "StepkeeperError": "stepkeeper.errors",
    "TornCheckpointError": "stepkeeper.errors",
    "Whole": "stepkeeper_planners",
    "__version__": "stepkeeper.version",
    "dcp": "stepkeeper.dcp",
    "distributed": "stepkeeper.distributed",
    "follow": "stepkeeper.follower",
    "prime_optimizer": "stepkeeper_planners",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'stepkeeper' has no attribute {name!r}")
    module = importlib.import_module(_MODULES[name])
    value = module if module.__name__ == f"stepkeeper.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
