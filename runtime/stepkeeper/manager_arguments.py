"""Check the arguments of a manager's constructor and convert them to stepkeeper's own values."""

import math
import operator
import os
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsIndex

import torch.distributed as dist

from stepkeeper.companion.messages import ClaimRequest
from stepkeeper.errors import BadUriError
from stepkeeper.policy.keep import KeepPolicy
from stepkeeper.policy.save import AnyOf, AtSteps, Auto, EveryNSteps, SavePolicy, parts_of
from stepkeeper.storage import check_slashes, expand_home
from stepkeeper.tier import TierPlace
from stepkeeper.training.environment import Environment

__all__ = [
    "ManagerArguments",
    "build_claim_request",
    "build_tier_place",
    "check_count",
    "check_seconds",
    "convert_interval",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerArguments:
    """The arguments that a manager was constructed with, as Python's own numbers, whatever library they came from."""

    path: str
    save_interval: int | SavePolicy
    max_to_keep: int
    max_pending_async: int
    process_group: dist.ProcessGroup | None
    chkpt_on_preemption: bool
    total_steps: int | None
    """The training's last step, which is saved whatever `save_interval` says."""

    keep: KeepPolicy | None
    """The policy that selects which commits stay; None keeps all."""

    tier: TierPlace | None
    """The local disk that saves go through and restores read from, if any."""

    take_over: str | bool
    """Name of the job whose root may become this one's; True allows any."""

    unsafe_single_writer: bool
    """True if the user promises that a store without exclusive creates has a single writer."""

    device_budget_bytes: int | None
    """Device memory that a snapshot may use; None finds it out."""

    stacks_after_s: float | None
    """Time that any step may take before stacks are dumped; None watches no steps."""

    environment: Environment | None
    """Identity and settings from the operator; None without an operator."""

    @property
    def policy(self) -> SavePolicy:
        """The save policy: `save_interval` itself, or EveryNSteps of that number; and the last step.

        Raises:
            ValueError: `save_interval` is less than one step.

        """
        interval = self.save_interval
        policy = EveryNSteps(interval) if isinstance(interval, int) else interval
        return policy if self.total_steps is None else AnyOf((policy, AtSteps((self.total_steps,))))


def check_count(name: str, number: SupportsIndex) -> int:
    """Return `number` as Python's own. Raises TypeError if it isn't whole, and ValueError if it is less than 1."""
    count = operator.index(number)
    if count < 1:
        raise ValueError(f"{name} is at least 1, not {count}")
    return count


def convert_interval(given: SupportsIndex | SavePolicy) -> int | SavePolicy:
    """Return the number of steps as Python's own, or the policy. Raises TypeError if it is neither."""
    if isinstance(given, SupportsIndex):
        return operator.index(given)
    if not callable(getattr(given, "due", None)):
        raise TypeError(
            f"save_interval is a number of steps or a policy of stepkeeper.policy.save, not {given!r}"
        )
    return given


def build_tier_place(folder: str | os.PathLike[str] | None, most_bytes: int | None) -> TierPlace | None:
    """Build the place of the local tier from `local_tier` and `local_tier_bytes`; None if there is no local tier.

    Raises:
        BadUriError: `folder` is a URI, or in a home folder that doesn't exist.
        ValueError: `most_bytes` is less than 1, or given without a folder.

    """
    if most_bytes is not None and (folder is None or most_bytes < 1):
        raise ValueError("local_tier_bytes is at least 1, and bounds a local_tier")
    if folder is None:
        return None
    path = os.fspath(folder)
    check_slashes(path)
    if "://" in path:
        raise BadUriError(f"local_tier is the path of a folder on this host's own disk, got {path!r}")
    return TierPlace(folder=str(Path(expand_home(path)).absolute()), most_bytes=most_bytes)


def build_claim_request(policy: SavePolicy, take_over: str | bool) -> ClaimRequest:
    """Build the companion's first request for the root. Only the policy `Auto` needs to know of earlier attempts."""
    return ClaimRequest(
        take_over=take_over if isinstance(take_over, str) else None,
        take_over_any=take_over is True,
        asks_past=any(isinstance(part, Auto) for part in parts_of(policy)),
    )


def check_seconds(name: str, seconds: float | None) -> float | None:
    """Return `seconds` if that is a time. Raises ValueError."""
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"{name} is a number of seconds greater than 0, not {seconds}")
    return seconds
