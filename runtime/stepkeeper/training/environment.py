"""Where a process finds out who it is and what is asked of it, when an operator made its container."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch.distributed as dist

from stepkeeper.companion.endpoint import ReportTarget
from stepkeeper.companion.messages import Open
from stepkeeper.contract import (
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
from stepkeeper.policy.keep import Keep, KeepPolicy
from stepkeeper.storage import check_slashes
from stepkeeper.storage.mounts import is_mount_point, read_mountinfo
from stepkeeper.tier import TierPlace

__all__ = ["Environment", "Places", "attempt_of", "check_ranks", "opening_of", "read_environment", "uri_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The files that a pod has; tests put them elsewhere."""

    settings_folder: Path = Path(SETTINGS_FOLDER)
    notice_file: Path = Path(NOTICE_FILE)
    termination_file: Path = Path(TERMINATION_FILE)
    token_file: Path = Path(TOKEN_FILE)
    local_tier_folder: Path = Path(LOCAL_TIER_FOLDER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the operator told this process."""

    identity: Identity
    settings: Settings
    places: Places

    @property
    def local_tier(self) -> Path | None:
        """Where the job's template has mounted a volume for it; None: it hasn't."""
        folder = self.places.local_tier_folder
        # An image may have such a folder of its own, on the node's system disk.
        return folder if is_mount_point(read_mountinfo(), PurePosixPath(folder.resolve())) else None

    @property
    def report_target(self) -> ReportTarget | None:
        """Where this job's reports go; None if nobody wants any."""
        endpoint = self.settings.endpoint
        if endpoint is None:
            return None
        return ReportTarget(
            url=endpoint.url,
            ca_file=str(self.places.settings_folder / CA_FILE_NAME),
            token_file=str(self.places.token_file),
        )


def read_environment(environ: Mapping[str, str] | None = None, places: Places | None = None) -> Environment:
    """What this container was told.

    Raises:
        NotInPodError: no operator made this container.
        ContractError: a variable or the settings are not as the operator writes them.

    """
    environ = os.environ if environ is None else environ
    places = places or Places()
    if not Identity.present(environ):
        raise NotInPodError(
            f"{Identity.variable('job_uid')} is not set: this process is in no container of a "
            "CheckpointedTrainingJob. Without the operator, write "
            "CheckpointManager('gs://bucket/run', save_interval=500) instead of from_env()"
        )
    path = places.settings_folder / SETTINGS_FILE_NAME
    try:
        text = path.read_bytes()
    except OSError as error:
        raise NotInPodError(
            f"the job's settings can't be read from {path}: {error}. The operator mounts them from a ConfigMap; "
            "a template must not mount anything over that folder"
        ) from error
    return Environment(identity=Identity.from_env(environ), settings=Settings.from_json(text), places=places)


def check_ranks(environment: Environment, group: dist.ProcessGroup | None) -> None:
    """Nothing, if the hosts of the job can talk to each other.

    Raises:
        ProcessGroupError: each of them would take itself for the whole job, and fence the others.

    """
    n_hosts, n_ranks = environment.identity.n_hosts, world_size_of(group)
    if n_ranks < n_hosts:
        raise ProcessGroupError(
            f"the job has {n_hosts} hosts, the process group {n_ranks} ranks; call "
            "torch.distributed.init_process_group('gloo', …) on all of them before CheckpointManager.from_env()"
        )


def attempt_of(environment: Environment | None) -> str | None:
    """What the operator calls this start of the job."""
    return None if environment is None else environment.identity.attempt


def opening_of(
    environment: Environment | None,
    rank_group: RankGroup,
    uri: str,
    keep: KeepPolicy | None,
    *,
    tier: TierPlace | None = None,
    unsafe_single_writer: bool = False,
) -> Open:
    """What a companion process is told first; without an operator nobody wants reports."""
    endpoint = None if environment is None else environment.settings.endpoint
    return Open(
        rank=rank_group.rank,
        world_size=rank_group.world_size,
        uri=uri,
        identity=None if environment is None else environment.identity,
        keep=None if keep is None else Keep.of(keep),
        tier=tier,
        unsafe_single_writer=unsafe_single_writer,
        report_target=None if environment is None else environment.report_target,
        report_interval_s=10 if endpoint is None else endpoint.report_interval_s,
    )


def uri_of(path: str) -> str:
    """A folder's path as a URI, a URI as it is. Raises BadUriError for what pathlib makes of a URI."""
    if "://" in path:
        return path
    check_slashes(path)
    return Path(path).absolute().as_uri()
