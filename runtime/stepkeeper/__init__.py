"""Save checkpoints that survive preemption.

The import is cheap: each name is loaded at its first use, and only names that need torch load it.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

# Exit functions run in reverse order. That of `fence` is registered first: it runs last, and chooses the exit code.
import stepkeeper.ending.fence  # noqa: F401  # see above

if TYPE_CHECKING:
    from stepkeeper import dcp, distributed, policy
    from stepkeeper.errors import (
        FencedError,
        PartlyRestoredError,
        PeerLostError,
        RestoreError,
        SaveError,
        StepkeeperError,
        StorageError,
        TornCheckpointError,
    )
    from stepkeeper.follower import follow
    from stepkeeper.manager import CheckpointManager
    from stepkeeper.manager_arguments import Options
    from stepkeeper.results import RestoreResult, StepOutcome
    from stepkeeper.save.in_flight import InFlight
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
    from stepkeeper_planners.errors import LoadMismatchError, UnsupportedValueError

__all__ = [
    "CheckpointManager",
    "FencedError",
    "InFlight",
    "LoadMismatchError",
    "Options",
    "PartlyRestoredError",
    "PeerLostError",
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
    "StorageError",
    "TornCheckpointError",
    "UnsupportedValueError",
    "Whole",
    "__version__",
    "dcp",
    "distributed",
    "follow",
    "policy",
    "prime_optimizer",
]

_NAMES: Final = {
    "stepkeeper": ("dcp", "distributed", "policy"),
    "stepkeeper.errors": (
        *("FencedError", "PartlyRestoredError", "PeerLostError", "RestoreError", "SaveError"),
        *("StepkeeperError", "StorageError", "TornCheckpointError"),
    ),
    "stepkeeper.follower": ("follow",),
    "stepkeeper.manager": ("CheckpointManager",),
    "stepkeeper.manager_arguments": ("Options",),
    "stepkeeper.results": ("RestoreResult", "StepOutcome"),
    "stepkeeper.save.in_flight": ("InFlight",),
    "stepkeeper.save.report": ("SaveReport",),
    "stepkeeper.version": ("__version__",),
    "stepkeeper_planners": (
        *("PerRank", "RandomState", "SPMDLoadPlanner", "SPMDSavePlanner", "Whole", "prime_optimizer"),
    ),
    "stepkeeper_planners.errors": ("LoadMismatchError", "UnsupportedValueError"),
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'stepkeeper' has no attribute {name!r}")
    home = _MODULES[name]
    if home == "stepkeeper":  # a module of this package
        return importlib.import_module(f"stepkeeper.{name}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
