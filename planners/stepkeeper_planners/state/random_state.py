"""Save and restore the random number generators of a process."""
# ruff: noqa: NPY002  # numpy's global generator is one of them

import hashlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from typing_extensions import override

from stepkeeper_planners.adapters import random_numbers
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.values import encode_value

__all__ = ["RandomState"]

_log: Final = logging.getLogger(__name__)

_SEED: Final = "seed"
"""The key of a new seed, which stands in place of a generator's state for a rank that saved none."""


@final
class RandomState:
    """Save the global random number generators of this process with the state, and set them again.

    Put one into the state: `{"random": RandomState()}`. It has the generators of Python's `random`, numpy's
    `np.random`, torch on the CPU, torch on the accelerator that this process uses (CUDA and others), and torch_xla. It
    reads them when a save takes its snapshot, and sets them when a load is done. So one object serves for the whole
    training, and nothing has to be copied into the state at each step.

    Generator objects of one's own (`torch.Generator`, `np.random.Generator`) are not among them.

    Ranks: each rank saves and gets back its own, as with `PerRank`. If another number of ranks loads, those that saved
    continue with theirs. A further rank gets a generator's state where all ranks had the same, as seeds of
    tensor-parallel ranks are; otherwise a seed of its own, derived from the saved states and its rank.
    """

    @override
    def __repr__(self) -> str:
        return "RandomState()"

    def state_dict(self) -> dict[str, Any]:
        """Return the present states of all generators."""
        return {"generators": PerRank(_read_generators(), resize=_resize)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators to the states that `state_dict` returned. A warning names unused ones."""
        saved = state["generators"]
        # torch's dcp.load calls this with the filled result of `state_dict`.
        generators: Any = saved.value if isinstance(saved, PerRank) else saved
        unused = [name for name, value in generators.items() if not _set_generator(name, value)]
        if unused:
            _log.warning(
                "the random number generators of %s were not restored: the checkpoint has their states, but this "
                "process doesn't use such devices. The other generators were restored",
                " and ".join(unused),
            )


def _read_generators() -> dict[str, Any]:
    found = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "accelerator": random_numbers.read_accelerator(),
        "xla": random_numbers.read_xla(),
    }
    return {name: state for name, state in found.items() if state is not None}


def _set_generator(name: str, state: Any) -> bool:
    """Set one generator. Return False if this process has none of that name."""
    is_seed = isinstance(state, Mapping) and set(state) == {_SEED}
    setter = (_SEEDERS if is_seed else _SETTERS).get(name, lambda _: False)
    # Most setters return None.
    return setter(state[_SEED] if is_seed else state) is not False


_SETTERS: Final[dict[str, Callable[[Any], object]]] = {
    "python": random.setstate,
    "numpy": np.random.set_state,
    "torch": torch.set_rng_state,
    "accelerator": random_numbers.set_accelerator,
    "xla": random_numbers.set_xla,
}
_SEEDERS: Final[dict[str, Callable[[int], object]]] = {
    "python": random.seed,
    "numpy": lambda seed: np.random.seed(seed % 2**32),
    "torch": torch.default_generator.manual_seed,
    "accelerator": random_numbers.seed_accelerator,
    "xla": random_numbers.set_xla,
}
"""Those of an accelerator and of torch_xla return False if this process doesn't use such devices."""


def _resize(saved: Sequence[Any], ranks: Ranks) -> dict[str, Any]:
    """Make the generators of one rank from those of another number of ranks; see `RandomState`."""
    if ranks.rank < len(saved):
        return dict(saved[ranks.rank])
    # A rank that saved nothing has the kinds of generators that one of the saved ranks had.
    kinds = saved[ranks.rank % len(saved)]
    return {name: _derive(name, [each.get(name) for each in saved], ranks.rank) for name in kinds}


def _derive(name: str, saved: Sequence[Any], rank: int) -> Any:
    """Return the state that all ranks saved if it is the same, else a new seed for this rank."""
    encoded = [encode_value(name, each) for each in saved]
    if all(each == encoded[0] for each in encoded):
        return saved[0]
    digest = hashlib.blake2b(encoded[rank % len(saved)] + rank.to_bytes(8, "big"), digest_size=8).digest()
    # Generators take seeds of at most 63 bits.
    return {_SEED: int.from_bytes(digest, "big") >> 1}
