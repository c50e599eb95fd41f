"""List the TPU generations: node label, chips per host, and valid topologies of a slice."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stepkeeper_operator.api.cel import CelRule, cel_list, listed

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "AcceleratorFacts",
    "choose_chips_per_host",
    "count_chips",
    "count_hosts",
    "topology_rules",
]


class Accelerator(StrEnum):
    """A TPU generation."""

    V4 = "v4"
    V5E = "v5e"
    V5P = "v5p"
    V6E = "v6e"
    V7X = "v7x"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorFacts:
    node_label: str
    """Value of cloud.google.com/gke-tpu-accelerator on its nodes."""

    dimensions: int
    """Number of sides of a topology: 2 (4x4) or 3 (2x2x4)."""

    host_sizes: tuple[int, ...]
    """Chips per host, for each machine type."""


ACCELERATORS: Final = {
    Accelerator.V4: AcceleratorFacts(node_label="tpu-v4-podslice", dimensions=3, host_sizes=(4,)),
    Accelerator.V5E: AcceleratorFacts(node_label="tpu-v5-lite-podslice", dimensions=2, host_sizes=(1, 4, 8)),
    Accelerator.V5P: AcceleratorFacts(node_label="tpu-v5p-slice", dimensions=3, host_sizes=(4,)),
    Accelerator.V6E: AcceleratorFacts(node_label="tpu-v6e-slice", dimensions=2, host_sizes=(1, 4, 8)),
    Accelerator.V7X: AcceleratorFacts(node_label="tpu7x", dimensions=3, host_sizes=(1, 4)),
}
"""Source: the machine types in GKE's TPU documentation and in the code of xpk and tpu-provisioner."""

_RECTANGLES: Final = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
"""The topologies of v5e and v6e."""

_SMALL_CUBOIDS: Final = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
"""The topologies with three sides that aren't made of whole cubes of 4x4x4."""

_CUBES: Final = (
    "(self.topology.matches('^[1-9][0-9]{0,3}x[1-9][0-9]{0,3}x[1-9][0-9]{0,3}$')"
    " && self.topology.split('x').all(side, int(side) % 4 == 0)"
    " && self.topology.split('x').map(side, int(side)).isSorted())"
)
"""CEL: `self.topology` consists of whole cubes of 4x4x4, with its sides in ascending order."""

_POD_CHIPS: Final = {Accelerator.V4: 4096, Accelerator.V5P: 8960, Accelerator.V7X: 9216}
"""Chips of a whole pod, for topologies with three sides: no slice has more. Source: Cloud TPU's pages of them."""

_SIZE: Final = " * ".join(f"int(self.topology.split('x')[{side}])" for side in range(3))
_USUAL_HOST: Final = 4


def topology_rules(at: str) -> tuple[CelRule, ...]:
    """Return the rules that the topology of the object at `at` exists for its accelerator."""
    flat = tuple(kind.value for kind, facts in ACCELERATORS.items() if facts.dimensions == 2)
    solid = tuple(kind.value for kind, facts in ACCELERATORS.items() if facts.dimensions == 3)
    limits = ", ".join(f"'{kind}': {n_chips}" for kind, n_chips in _POD_CHIPS.items())
    return (
        CelRule(
            at=at,
            cel=f"!(self.accelerator in {cel_list(flat)}) || self.topology in {cel_list(_RECTANGLES)}",
            message=f"topology: {listed(flat)} have two sides: use one of {', '.join(_RECTANGLES)}",
        ),
        CelRule(
            at=at,
            cel=f"!(self.accelerator in {cel_list(solid)}) || self.topology in {cel_list(_SMALL_CUBOIDS)}"
            f" || (self.accelerator == 'v7x' && self.topology == '1x1x1') || {_CUBES}",
            message=f"topology: {listed(solid)} have three sides: use {', '.join(_SMALL_CUBOIDS)}, or"
            " multiples of 4 in ascending order like 4x4x8",
        ),
        CelRule(
            at=at,
            cel=f"!(self.accelerator in {cel_list(solid)} && {_CUBES}) || {_SIZE} <= {{{limits}}}[self.accelerator]",
            message="topology: it has more chips than a pod, "
            + ", ".join(f"{n_chips} of {kind}" for kind, n_chips in _POD_CHIPS.items())
            + "; use a smaller one",
        ),
    )


def count_chips(topology: str) -> int:
    """Count the chips of one slice: the product of the sides."""
    return math.prod(int(side) for side in topology.split("x"))


def choose_chips_per_host(topology: str, setting: int | None) -> int:
    """Return the user's setting, or the default: 4 chips, which every generation has, or 1 for a single chip."""
    return setting if setting is not None else min(_USUAL_HOST, count_chips(topology))


def count_hosts(topology: str, setting: int | None) -> int:
    """Count the hosts of one slice: at least 1, also if chipsPerHost breaks its rule."""
    return max(1, count_chips(topology) // choose_chips_per_host(topology, setting))
