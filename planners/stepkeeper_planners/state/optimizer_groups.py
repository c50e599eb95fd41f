"""Find the optimizers that would refuse a checkpoint's parameter groups, before anything of it is in the state."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from stepkeeper_planners.state.optimizer_tensors import has_torchs_load
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.tree import Path, join_path
from stepkeeper_planners.state.whole import Whole

__all__ = ["find_other_groups"]


def find_other_groups(state: Mapping[str, object], values: Mapping[str, object]) -> dict[str, str]:
    """Find the optimizers whose load_state_dict() will raise: a group has another number of parameters.

    Those that load in a way of their own, or have a hook for it, may take any number.

    Args:
        state: the nested state that is to be filled.
        values: the loaded values by their names in the state.

    Returns:
        The name of each such optimizer, and how its groups differ.
    """
    found = {}
    for path, optimizer, groups in _iterate_optimizers(state, (), values):
        present = [len(group["params"]) for group in optimizer.param_groups]
        differing = [
            f"group {number} has {n_stored} parameters in the checkpoint, {n_present} in the state"
            for number, (n_stored, n_present) in enumerate(zip(groups, present, strict=False))
            if n_stored not in {n_present, None}
        ]
        if len(groups) != len(present):
            differing = [f"{len(groups)} groups in the checkpoint, {len(present)} in the state"]
        if differing:
            found[join_path(path) or "param_groups"] = "; ".join(differing)
    return found


def _iterate_optimizers(
    node: Any, path: Path, values: Mapping[str, object]
) -> Iterator[tuple[Path, Optimizer, list[int | None]]]:
    """Yield the optimizers in a state, with the number of parameters of each stored group; None: it isn't loaded."""
    if isinstance(node, Optimizer):
        optimizer = _unwrap(node)
        if optimizer is not None:
            names = (
                join_path((*path, "param_groups", number, "params"))
                for number in range(len(optimizer.param_groups))
            )
            yield path, optimizer, [_count(values.get(name)) for name in names]
    elif isinstance(node, PerRank | Whole):
        yield from _iterate_boxed(node, path, values.get(join_path(path)))
    elif isinstance(node, Mapping | list):
        for key, part in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _iterate_optimizers(part, (*path, str(key)), values)


def _iterate_boxed(node: Any, path: Path, loaded: Any) -> Iterator[tuple[Path, Optimizer, list[int | None]]]:
    """Yield the optimizers in a box, of which `loaded` was loaded as one value."""
    if not isinstance(loaded, Mapping):
        return
    if isinstance(node, PerRank | Whole):
        yield from _iterate_boxed(node.value, path, loaded)
    elif isinstance(node, Optimizer):
        optimizer, groups = _unwrap(node), loaded.get("param_groups")
        if optimizer is not None and isinstance(groups, list):
            yield path, optimizer, [_count(group.get("params")) for group in groups]
    elif isinstance(node, Mapping):
        for key, part in node.items():
            yield from _iterate_boxed(part, (*path, str(key)), loaded.get(key))


def _count(params: object) -> int | None:
    return len(params) if isinstance(params, list) else None


def _unwrap(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer that takes the groups by torch's own rules: this one, or the one that it wraps."""
    if has_torchs_load(optimizer):
        return optimizer
    wrapped = getattr(optimizer, "optimizer", None)
    return _unwrap(wrapped) if isinstance(wrapped, Optimizer) else None
