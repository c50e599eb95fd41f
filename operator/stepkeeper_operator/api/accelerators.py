"""Describe the TPU generations on Kubernetes: node label, shape of a topology, chips on a host."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = [
    "ACCELERATORS",
    "SHAPES_OF_TWO_SIDES",
    "SMALL_SHAPES_OF_THREE_SIDES",
    "Accelerator",
    "AcceleratorFacts",
    "choose_chips_per_host",
    "count_chips",
    "count_hosts",
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
    """Chips on a host, for each machine type."""


ACCELERATORS: Final = {
    Accelerator.V4: AcceleratorFacts(node_label="tpu-v4-podslice", dimensions=3, host_sizes=(4,)),
    Accelerator.V5E: AcceleratorFacts(node_label="tpu-v5-lite-podslice", dimensions=2, host_sizes=(1, 4, 8)),
    Accelerator.V5P: AcceleratorFacts(node_label="tpu-v5p-slice", dimensions=3, host_sizes=(4,)),
    Accelerator.V6E: AcceleratorFacts(node_label="tpu-v6e-slice", dimensions=2, host_sizes=(1, 4, 8)),
    Accelerator.V7X: AcceleratorFacts(node_label="tpu7x", dimensions=3, host_sizes=(1, 4)),
}
"""Source: the machine types in GKE's TPU documentation and in the code of xpk and tpu-provisioner."""

SHAPES_OF_TWO_SIDES: Final = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
"""The topologies of v5e and v6e."""

SMALL_SHAPES_OF_THREE_SIDES: Final = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
"""The topologies of v4 and later ones with three sides that aren't made of whole cubes of 4x4x4."""

_USUAL_HOST: Final = 4


def count_chips(topology: str) -> int:
    """Count the chips of one slice: the product of the sides."""
    return math.prod(int(side) for side in topology.split("x"))


def choose_chips_per_host(topology: str, asked: int | None) -> int:
    """Return the chips per host that the user set, else 4, which every generation has, or 1 for a single chip."""
    return asked if asked is not None else min(_USUAL_HOST, count_chips(topology))


def count_hosts(topology: str, asked: int | None) -> int:
    """Count the hosts of one slice."""
    return max(1, count_chips(topology) // choose_chips_per_host(topology, asked))
