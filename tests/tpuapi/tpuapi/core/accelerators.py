"""The accelerators that the API offers, and how many cores and hosts each has."""

import math
import re
from dataclasses import dataclass

from tpuapi.core.errors import invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One generation of TPUs."""

    kind: str
    """AcceleratorConfig.Type's name."""
    prefix: str
    """What accelerator types begin with."""
    cores_per_chip: int
    dimensions: int
    sizes: tuple[int, ...]
    """The numbers that accelerator types end with."""
    quota_words: tuple[str, str]
    """What stands before and after "Preemptible" in the name of its quota."""


def _doubled(first: int, last: int) -> tuple[int, ...]:
    return tuple(first * 2**n for n in range(int(math.log2(last // first)) + 1))


FAMILIES = (
    Family(
        kind="V2",
        prefix="v2",
        cores_per_chip=2,
        dimensions=2,
        sizes=(8, *_doubled(32, 512)),
        quota_words=("TPUV2s", "Pod"),
    ),
    Family(
        kind="V3",
        prefix="v3",
        cores_per_chip=2,
        dimensions=2,
        sizes=(8, *_doubled(32, 2048)),
        quota_words=("TPUV3s", "Pod"),
    ),
    Family(
        kind="V4",
        prefix="v4",
        cores_per_chip=2,
        dimensions=3,
        sizes=_doubled(8, 4096),
        quota_words=("TPUV4s", "Pod"),
    ),
    Family(
        kind="V5LITE_POD",
        prefix="v5litepod",
        cores_per_chip=1,
        dimensions=2,
        sizes=(1, *_doubled(4, 256)),
        quota_words=("TPUV5s", "Litepod"),
    ),
    Family(
        kind="V5P",
        prefix="v5p",
        cores_per_chip=2,
        dimensions=3,
        sizes=_doubled(8, 8192),
        quota_words=("TPUV5P", ""),
    ),
    Family(
        kind="V6E",
        prefix="v6e",
        cores_per_chip=1,
        dimensions=2,
        sizes=(1, *_doubled(4, 256)),
        quota_words=("TPUV6E", ""),
    ),
)

_BY_PREFIX = {family.prefix: family for family in FAMILIES}
_BY_KIND = {family.kind: family for family in FAMILIES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One slice's shape."""

    family: Family
    n_cores: int
    topology: str
    """Empty if only the type was given."""

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


def from_type(accelerator_type: str, field: str) -> Accelerator:
    """Read an accelerator type, such as `v5litepod-16`.

    Raises:
        ApiError: The API has none of that name; INVALID_ARGUMENT.
    """
    prefix, _, size = accelerator_type.rpartition("-")
    family = _BY_PREFIX.get(prefix)
    if family is None or not size.isdecimal() or int(size) not in family.sizes:
        raise invalid(field, f"accelerator type '{accelerator_type}' is not known in this zone")
    return Accelerator(family=family, n_cores=int(size), topology="")


def from_config(kind: str, topology: str, field: str) -> Accelerator:
    """Read a type and its topology in chips, such as V5P and `2x2x4`.

    Raises:
        ApiError: One is missing or wrong, or they don't fit each other; INVALID_ARGUMENT.
    """
    family = _BY_KIND.get(kind)
    if family is None:
        raise invalid(f"{field}.type", "the type of TPU is required")
    if not topology:
        raise invalid(f"{field}.topology", "the topology in chips is required")
    if (
        re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", topology) is None
        or topology.count("x") != family.dimensions - 1
    ):
        raise invalid(f"{field}.topology", f"'{topology}' does not have {family.dimensions} dimensions")
    n_cores = math.prod(int(size) for size in topology.split("x")) * family.cores_per_chip
    if n_cores not in family.sizes:
        raise invalid(f"{field}.topology", f"'{topology}' is not a topology of {kind}")
    return Accelerator(family=family, n_cores=n_cores, topology=topology)


def all_types() -> tuple[str, ...]:
    return tuple(f"{family.prefix}-{size}" for family in FAMILIES for size in family.sizes)


def family_of(accelerator_type: str) -> Family:
    """Find the family of an accelerator type, or of the words before its number.

    Raises:
        KeyError: There is none.
    """
    prefix = accelerator_type if accelerator_type in _BY_PREFIX else accelerator_type.rpartition("-")[0]
    return _BY_PREFIX[prefix]
