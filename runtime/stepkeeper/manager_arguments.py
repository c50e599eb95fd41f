"""Define a manager's options, and check and convert the arguments of its constructors."""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, SupportsIndex

import torch.distributed as dist

from stepkeeper.companion.messages import ClaimRequest
from stepkeeper.errors import BadUriError
from stepkeeper.policy.keep import AnyOf as KeepAnyOf
from stepkeeper.policy.keep import KeepPolicy, LastN, from_retention
from stepkeeper.policy.save import AnyOf, AtSteps, Auto, EveryNSteps, SavePolicy, from_interval, parts_of
from stepkeeper.quantities import check_number, check_whole
from stepkeeper.stacks.pace import PaceLimits
from stepkeeper.storage import check_slashes, expand_home
from stepkeeper.tier import TierPlace
from stepkeeper.training.environment import Environment

__all__ = ["ManagerArguments", "Options", "build_arguments", "build_claim_request"]


_REPLICAS: Final = ("divide", "first")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings of a manager that few trainings need to change.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A number is out of its range.
    """

    max_pending: int = 1
    """Number of snapshots that host memory may hold at once, at least 1. With 1, a save waits for the end of the save
    before it."""

    take_over: str | bool = False
    """Name of the job whose root becomes this one's; True takes over the root of any job."""

    unsafe_single_writer: bool = False
    """True to promise that a store without exclusive creates has only one writer."""

    device_budget_bytes: int | None = None
    """Device memory of this process, in bytes, that a snapshot may use until it is in host memory. The rest of the
    snapshot waits. None starts with all device memory, and halves it each time that the devices have no room."""

    replicas: str = "divide"
    """The ranks that write what several hold copies of. "divide" divides it among them, if the copies are equal. With
    "first" the first rank that holds a part writes it, and nothing is compared."""

    local_tier: str | os.PathLike[str] | None = None
    """A folder on a disk of this host. Saves are staged there on their way to the root, so that host memory is free
    sooner, and restores read from it. `from_env` uses by default the volume that the job's template mounts at
    /var/cache/stepkeeper, if it mounts one."""

    local_tier_bytes: int | None = None
    """Number of bytes that this process may use in the local tier; None sets no limit."""

    stacks_after_s: float | None = 300.0
    """Seconds after which a step is slow, if it also takes ten times longer than any before it. The stacks of all
    ranks' threads are then written to the log and into the report to an operator. None doesn't watch steps, except by
    a job's `spec.hang.afterSeconds`."""

    on_save_failure: int = 0
    """Number of failed saves in a row that training continues after, each with a warning; the next failure is raised.
    Without a later save to recover, it is raised too: by `wait`, and at the end."""

    stop_on_notice: bool = True
    """True if SIGTERM or another notice makes all ranks save one step and stop."""

    def __post_init__(self) -> None:
        check_whole("max_pending", self.max_pending, 1)
        check_whole("on_save_failure", self.on_save_failure, 0)
        for name, least in (("device_budget_bytes", 0), ("local_tier_bytes", 1)):
            if (number := getattr(self, name)) is not None:
                check_whole(name, number, least)
        if self.replicas not in _REPLICAS:
            raise ValueError(f"replicas must be one of {', '.join(_REPLICAS)}, not {self.replicas!r}")
        job: object = self.take_over
        if not isinstance(job, str | bool) or job == "":
            raise TypeError(f"take_over must be a job's namespace/name, True or False, not {job!r}")
        if self.local_tier is not None:
            _check_path("local_tier must be the path of a folder", self.local_tier)
        limit_s = self.stacks_after_s
        if limit_s is not None and not 0 < check_number("stacks_after_s", limit_s) < math.inf:
            raise ValueError(f"stacks_after_s must be a number of seconds greater than 0, not {limit_s}")
        for name in ("unsafe_single_writer", "stop_on_notice"):
            if not isinstance(flag := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {flag!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerArguments:
    """The checked arguments of a manager, with Python's own numbers instead of those of other libraries."""

    path: str
    save: SavePolicy
    """The given policy, or EveryNSteps of the given number."""

    keep: KeepPolicy | None
    """The policy that selects which commits stay; None keeps all."""

    total_steps: int | None
    """The training's last step, which is saved in any case."""

    process_group: dist.ProcessGroup | None
    options: Options
    tier: TierPlace | None
    """The local disk that saves go through and restores read from, if any."""

    environment: Environment | None
    """Identity and settings from the operator; None without an operator."""

    @property
    def pace_limits(self) -> PaceLimits:
        """When a step, or a stage between steps, takes too long: by the options, and by the job's limits for hangs."""
        least_s, job = self.options.stacks_after_s, self.environment
        return PaceLimits(
            least_millis=None if least_s is None else int(least_s * 1000),
            hang=None if job is None else job.settings.hang,
        )

    @property
    def policy(self) -> SavePolicy:
        """The save policy, which also saves the training's last step."""
        return self.save if self.total_steps is None else AnyOf((self.save, AtSteps((self.total_steps,))))


def build_arguments(
    path: str | os.PathLike[str],
    *,
    save: SupportsIndex | SavePolicy | None,
    keep: SupportsIndex | KeepPolicy | None,
    total_steps: SupportsIndex | None = None,
    process_group: dist.ProcessGroup | None,
    options: Options,
    environment: Environment | None = None,
) -> ManagerArguments:
    """Check and convert a manager's arguments, and add a job's settings; see `CheckpointManager`."""
    if not isinstance(options, Options):
        raise TypeError(f"options must be an Options value, not a value of type {type(options).__name__}")
    # Without a policy of its own, a job's manager saves by the job's interval only.
    saves = [_convert_save(save)] if save is not None or environment is None else []
    if isinstance(keep, SupportsIndex):
        keep = LastN(check_whole("keep", keep, 1))
    keeps = [] if keep is None else [keep]
    if environment is not None:
        settings = environment.settings
        # `from_env` takes no total_steps: the job has it.
        saves, total_steps = [from_interval(settings.interval), *saves], settings.total_steps
        keeps = [from_retention(settings.retention), *keeps]
        tier = environment.local_tier if options.local_tier is None else options.local_tier
        # In a pod without the volume, a limit for the tier is no error.
        tier_bytes = None if tier is None else options.local_tier_bytes
        options = replace(options, local_tier=tier, local_tier_bytes=tier_bytes)
    return ManagerArguments(
        path=expand_home(_check_path("path must be a URI or the path of a folder", path)),
        save=saves[0] if len(saves) == 1 else AnyOf(tuple(saves)),
        keep=KeepAnyOf(tuple(keeps)) if len(keeps) > 1 else next(iter(keeps), None),
        total_steps=None if total_steps is None else check_whole("total_steps", total_steps, 1),
        process_group=process_group,
        options=options,
        tier=_build_tier_place(options.local_tier, options.local_tier_bytes),
        environment=environment,
    )


def _check_path(what: str, given: object) -> str:
    """Return the path as text. Raises a TypeError that begins with `what` if it isn't a path."""
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"{what}, not a value of type {type(given).__name__}")
    return os.fspath(given)


def _convert_save(given: Any) -> SavePolicy:
    """Return the given policy, or that of the given number of steps. Raises TypeError for other values."""
    if isinstance(given, SupportsIndex):
        return EveryNSteps(check_whole("save", given, 1))
    for part in parts_of(given):
        if isinstance(part, type) or not callable(getattr(part, "due", None)):
            raise TypeError(
                f"save must be a number of steps or a policy of stepkeeper.policy.save, not {part!r}"
            )
    policy: SavePolicy = given
    return policy


def _build_tier_place(folder: str | os.PathLike[str] | None, most_bytes: int | None) -> TierPlace | None:
    """Build the place of the local tier, if there is one. Raises BadUriError and ValueError."""
    if folder is None:
        if most_bytes is not None:
            raise ValueError("local_tier_bytes needs a local_tier: pass its folder too")
        return None
    path = os.fspath(folder)
    check_slashes(path)
    if "://" in path:
        raise BadUriError(f"local_tier must be the path of a folder on this host's own disk, not {path!r}")
    return TierPlace(folder=str(Path(expand_home(path)).absolute()), most_bytes=most_bytes)


def build_claim_request(policy: SavePolicy, take_over: str | bool) -> ClaimRequest:
    """Build the companion's first request for the root. It asks for earlier attempts only for the policy `Auto`."""
    return ClaimRequest(
        take_over=take_over if isinstance(take_over, str) else None,
        take_over_any=take_over is True,
        asks_past=any(isinstance(part, Auto) for part in parts_of(policy)),
    )
