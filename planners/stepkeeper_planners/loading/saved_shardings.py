"""Choose the shardings with which a load fills tensors whose sharding is open."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from stepkeeper_planners.adapters.op_sharding import Tiling, parse_sharding
from stepkeeper_planners.errors import UnsupportedShardingError

__all__ = ["PresentSharding", "SavedShardings", "choose_shardings"]

_UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedShardings:
    """The shardings of a checkpoint's XLA tensors, as they were when they were saved."""

    n_devices: int = 0
    """The number of devices that the tensors were sharded over, in all processes."""
    by_name: Mapping[str, str] = field(default_factory=dict)
    """The text of each tensor's sharding. Tensors that had none are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentSharding:
    """The sharding that a tensor of the state has before it is filled."""

    text: str
    """Empty if it has none: it isn't marked, and no program has read or made it."""
    ndim: int
    inferred: bool = False
    """Whether priming gave it this sharding, by the parameter's. A step without priming may choose another one."""

    @property
    def is_marked(self) -> bool:
        """Return whether the user chose the sharding."""
        return bool(self.text) and not self.inferred


def choose_shardings(
    saved: SavedShardings, present: Mapping[str, PresentSharding], n_devices: int
) -> dict[str, str]:
    """Choose which tensors get the sharding that they had when they were saved, if the layout is still that one.

    A step's program is known by the shardings of all that it reads, also of those that XLA chose in an earlier step.
    So a tensor whose sharding is open, or was inferred by priming, gets the saved one: the next step is the program
    that the training would have run. Any other tensor keeps its sharding.

    The layout has changed, and open shardings stay open, if

    - the number of devices is another one, or
    - a tensor that is divided now was not divided so when it was saved, or
    - tensors that were divided are replicated now, and none is divided as it was. Where one is, the others were
      replicated for other reasons.

    `n_devices` is the number of devices that XLA shards tensors over. Return the text of the sharding for each tensor
    that gets one, by name.
    """
    if saved.n_devices != n_devices:
        return {}
    one_divided_alike = one_was_divided = False
    for fqn, now in present.items():
        if not now.is_marked or fqn not in saved.by_name:
            continue
        tiling, before = _parse(now.text, now.ndim), _parse(saved.by_name[fqn], now.ndim)
        if tiling == before:
            one_divided_alike |= tiling is not None
        elif tiling is not None:
            return {}
        else:
            one_was_divided = True
    if one_was_divided and not one_divided_alike:
        return {}
    return {
        fqn: saved.by_name[fqn]
        for fqn, now in present.items()
        if not now.is_marked
        and saved.by_name.get(fqn, now.text) != now.text
        and _parse(saved.by_name[fqn], now.ndim) != _UNKNOWN
    }


def _parse(text: str, ndim: int) -> Tiling | str | None:
    """Return the tiling, None for one copy on every device, or `_UNKNOWN`."""
    try:
        return parse_sharding("tensor", text, ndim)
    except UnsupportedShardingError:
        return _UNKNOWN
