"""The accelerators that the API offers, and how many cores and hosts each has."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpuapi.rules import invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    prefix: str
    """What accelerator types begin with."""
    cores_per_chip: int
    dimensions: int
    max_cores: int
    quota: str
    """What its quota is called, between TPUS and PerProjectPerZone."""


FAMILIES = {
    "V4": Family(prefix="v4", cores_per_chip=2, dimensions=3, max_cores=4096, quota="V4sPod"),
    "V5LITE_POD": Family(
        prefix="v5litepod", cores_per_chip=1, dimensions=2, max_cores=256, quota="V5sLitepod"
    ),
    "V5P": Family(prefix="v5p", cores_per_chip=2, dimensions=3, max_cores=8192, quota="V5P"),
    "V6E": Family(prefix="v6e", cores_per_chip=1, dimensions=2, max_cores=256, quota="V6E"),
}
"""By the name that AcceleratorConfig.Type has."""

_BY_PREFIX = {family.prefix: family for family in FAMILIES.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One slice's shape."""

    family: Family
    n_cores: int

    @property
    def type(self) -> str:
        return f"{self.family.prefix}-{self.n_cores}"

    @property
    def n_hosts(self) -> int:
        """The number of its workers: virtual machines with up to 4 chips, or 8 in the one host of v5e and v6e."""
        single_host_chips = 8 if self.family.cores_per_chip == 1 else 4
        return 1 if self.n_chips <= single_host_chips else self.n_chips // 4

    @property
    def n_chips(self) -> int:
        return self.n_cores // self.family.cores_per_chip


def read_accelerator(node: Mapping[str, Any]) -> Accelerator:
    """Read the accelerator of a node in a request: its type, such as v5litepod-16, or V5P and 2x2x4.

    Raises:
        RefusedError: It names none, two, or one that the API doesn't offer.
    """
    wanted, config = node.get("accelerator_type", ""), node.get("accelerator_config")
    if bool(wanted) is (config is not None):
        raise invalid("accelerator_type", "either it or accelerator_config is required")
    if config is None:
        prefix, _, size = wanted.rpartition("-")
        family, n_cores = _BY_PREFIX.get(prefix), int(size) if size.isdecimal() else 0
    else:
        family, n_cores = _read_topology(config.get("type", ""), config.get("topology", ""))
    if family is None or n_cores.bit_count() != 1 or n_cores > family.max_cores:
        raise invalid("accelerator_type", f"accelerator type '{wanted or config}' is not known in this zone")
    return Accelerator(family=family, n_cores=n_cores)


def _read_topology(kind: str, topology: str) -> tuple[Family | None, int]:
    family = FAMILIES.get(kind)
    if family is None or re.fullmatch(rf"[1-9]\d*(x[1-9]\d*){{{family.dimensions - 1}}}", topology) is None:
        return None, 0
    return family, math.prod(map(int, topology.split("x"))) * family.cores_per_chip
