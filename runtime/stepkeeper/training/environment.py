"""Read this process's identity and settings, as the operator or `stepkeeper run` made them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final, Self

import torch.distributed as dist

from stepkeeper.companion.messages import OpenRequest
from stepkeeper.companion.reporter import ReportTarget
from stepkeeper.contract import (
    ATTEMPT_FOLDER_VARIABLE,
    CA_FILE_NAME,
    LOCAL_TIER_FOLDER,
    NOTICE_FILE,
    SETTINGS_FILE_NAME,
    SETTINGS_FOLDER,
    TERMINATION_FILE,
    TOKEN_FILE,
    Identity,
    Settings,
)
from stepkeeper.coordination.rank_group import RankGroup, world_size_of
from stepkeeper.errors import NotInPodError, ProcessGroupError
from stepkeeper.loggers import logger
from stepkeeper.policy.keep import Keep, KeepPolicy
from stepkeeper.storage.mounts import is_mount_point, read_mountinfo
from stepkeeper.tier import TierPlace
from stepkeeper.version import __version__

__all__ = [
    "Environment",
    "PodPaths",
    "attempt_name",
    "build_open_request",
    "check_world_size",
    "read_environment",
]

_log: Final = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPaths:
    """Paths of the operator's files and folders in a pod, or of those of `stepkeeper run`. Tests use other paths."""

    settings_folder: Path = Path(SETTINGS_FOLDER)
    notice_file: Path = Path(NOTICE_FILE)
    termination_file: Path = Path(TERMINATION_FILE)
    token_file: Path = Path(TOKEN_FILE)
    local_tier_folder: Path = Path(LOCAL_TIER_FOLDER)
    attempt_folder: Path | None = None
    """The folder of an attempt of `stepkeeper run`; None in a pod."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Return the paths of this process's supervisor: the operator, or `stepkeeper run`."""
        if ATTEMPT_FOLDER_VARIABLE not in environ:
            return cls()
        folder = Path(environ[ATTEMPT_FOLDER_VARIABLE])
        return cls(
            settings_folder=folder,
            notice_file=folder / "notice",
            token_file=folder / Path(TOKEN_FILE).name,
            local_tier_folder=folder,
            attempt_folder=folder,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The identity and the settings that the operator gave this process."""

    identity: Identity
    settings: Settings
    places: PodPaths

    @property
    def local_tier(self) -> Path | None:
        """Folder of the volume that the job's template mounts for the local tier; None if it mounts none."""
        folder = self.places.local_tier_folder
        # An image may also have such a folder, on the node's system disk.
        return folder if is_mount_point(read_mountinfo(), PurePosixPath(folder.resolve())) else None

    @property
    def report_target(self) -> ReportTarget | None:
        """Address and credentials for this job's reports; None if there is no endpoint."""
        endpoint = self.settings.endpoint
        if endpoint is None:
            return None
        return ReportTarget(
            url=endpoint.url,
            ca_file=str(self.places.settings_folder / CA_FILE_NAME),
            token_file=str(self.places.token_file),
        )


def read_environment(places: PodPaths | None = None) -> Environment:
    """Read the identity and settings that the operator gave this container.

    Raises NotInPodError if no operator made it, ContractError if they are not as the operator writes them.
    """
    if not Identity.present(os.environ):
        raise NotInPodError(
            f"{Identity.variable('job_uid')} is not set: this process is not in a container of a "
            "CheckpointedTrainingJob. Start it by `stepkeeper run --root runs/a train.py`, or write "
            "stepkeeper.CheckpointManager('gs://bucket/run', save=500) instead of from_env()"
        )
    identity = Identity.from_env(os.environ)
    places = places or replace(
        PodPaths.from_env(os.environ), termination_file=Path(identity.termination_file)
    )
    path = places.settings_folder / SETTINGS_FILE_NAME
    try:
        text = path.read_bytes()
    except OSError as error:
        raise NotInPodError(
            f"reading the job's settings from {path} failed: {error}. The operator mounts them from a ConfigMap: "
            "do not mount anything over that folder in the template"
        ) from error
    environment = Environment(identity=identity, settings=Settings.from_json(text), places=places)
    if unknown := Settings.list_unknown(text):
        _log.warning(
            "the operator is newer than this stepkeeper %s, which ignores parts of %s: %s",
            __version__,
            path,
            "; ".join(unknown),
        )
    return environment


def check_world_size(environment: Environment, group: dist.ProcessGroup | None) -> None:
    """Check that the process group has a rank for each host of the job, or each would train as the whole."""
    n_hosts, n_ranks = environment.identity.n_hosts, world_size_of(group)
    if n_ranks < n_hosts:
        raise ProcessGroupError(
            f"the job has {n_hosts} hosts, but the process group has {n_ranks} ranks; call "
            "stepkeeper.distributed.init() on all of them before CheckpointManager.from_env()"
        )


def attempt_name(environment: Environment | None) -> str | None:
    """Return the operator's name for this start of the job; None outside an operator's pod."""
    return None if environment is None else environment.identity.attempt


def build_open_request(
    environment: Environment | None,
    rank_group: RankGroup,
    uri: str,
    keep: KeepPolicy | None,
    *,
    tier: TierPlace | None = None,
    unsafe_single_writer: bool = False,
) -> OpenRequest:
    """Build the first message to a companion process. Without an operator it asks for no reports."""
    endpoint = None if environment is None else environment.settings.endpoint
    return OpenRequest(
        rank=rank_group.rank,
        world_size=rank_group.world_size,
        uri=uri,
        identity=None if environment is None else environment.identity,
        keep=None if keep is None else Keep.from_policy(keep),
        tier=tier,
        unsafe_single_writer=unsafe_single_writer,
        report_target=None if environment is None else environment.report_target,
        report_interval_s=10 if endpoint is None else endpoint.report_interval_s,
    )
