"""Form the process group, and describe this process's place in it."""

import importlib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, HashStore  # type: ignore[attr-defined]  # torch does not list it
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from stepkeeper.contract import ContractError, Identity
from stepkeeper.distributed.devices import Hardware, find_hardware
from stepkeeper.distributed.launchers import Launcher, choose_launcher, is_launched, read_local_rank
from stepkeeper.distributed.meeting import meet
from stepkeeper.ending.before_manager import exit_at_early_notice
from stepkeeper.ending.message import count_restarts, exit_for_lost_peer
from stepkeeper.errors import PeerLostError, ProcessGroupError

__all__ = ["Membership", "init"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """This process's place among the processes that train together."""

    device: torch.device
    """The device to train on: `cuda:1` for the second process of a host with GPUs, `xla` for torch_xla's devices, else
    `cpu`.
    """

    rank: int
    """The number of this process, from 0 on."""

    world_size: int
    """The number of processes."""

    local_rank: int
    """The number of this process on its host, from 0 on."""


_TIMEOUT_S: Final = 1800.0
"""gloo's default. Hosts of one job start minutes apart, while images are pulled, and a first compilation takes as
long."""


def init(*, timeout_s: float = _TIMEOUT_S) -> Membership:
    """Form the process group of the training, or find the existing one.

    Call it first, before `CheckpointManager`::

        this = stepkeeper.distributed.init()
        model.to(this.device)

    On a TPU the group is torch_xla's (`xla://`), over gloo, with SPMD turned on if this process is the only one on its
    host. Elsewhere it is formed by torchrun's variables, or by those that the operator sets in each pod. A process
    without a launcher becomes a group of one. Tensors on GPUs use NCCL, those on the CPU gloo.

    If a pod gets SIGTERM while it waits for the others, or before it has a manager, the process exits with code 75:
    there is nothing to save. A handler of the program, or torchrun as the launcher, takes precedence. If rank 0 is lost
    meanwhile, the others exit with code 78: rank 0 has the cause.

    Args:
        timeout_s: Seconds for all processes to join, and for each later collective.

    Returns:
        This process's place among the others.

    Raises:
        ProcessGroupError: Not all processes joined, or an environment variable is missing or malformed.

    Ranks:
        All ranks call this. If a group exists already, this changes nothing and doesn't wait.
    """
    _exit_at_notice()
    hardware = find_hardware()
    if not dist.is_initialized():
        try:
            _form(hardware, timeout_s)
        except PeerLostError as error:
            exit_for_lost_peer(error)
        except ContractError as error:
            raise ProcessGroupError(str(error)) from error
        # torch raises these for all failures; DistStoreError and others are subclasses.
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ProcessGroupError):
                raise
            raise ProcessGroupError(f"forming the process group failed: {error}") from error
    return Membership(
        device=hardware.device,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=read_local_rank(os.environ),
    )


def _exit_at_notice() -> None:
    """Make a notice end this pod's process until it has a manager. A launcher of several ends them itself."""
    if Identity.present(os.environ) and not is_launched(os.environ):
        try:
            exit_at_early_notice(Identity.from_env(os.environ))
        except ContractError as error:
            raise ProcessGroupError(str(error)) from error


def _form(hardware: Hardware, timeout_s: float) -> None:
    timeout = timedelta(seconds=timeout_s)
    match choose_launcher(os.environ, on_tpu=hardware.on_tpu):
        case Launcher.TPU:
            _prepare_tpu()
            dist.init_process_group("gloo", init_method="xla://", timeout=timeout)
        case Launcher.TORCHRUN:
            _join_launched(hardware.backend, timeout)
        case Launcher.OPERATOR:
            _join_pods(hardware.backend, timeout)
        case Launcher.NONE:
            dist.init_process_group(
                hardware.backend, store=HashStore(), rank=0, world_size=1, timeout=timeout
            )


def _join_pods(backend: str, timeout: timedelta) -> None:
    """Form the group of one process in each of the operator's pods."""
    identity = Identity.from_env(os.environ)
    store = meet(identity, timeout.total_seconds()) if identity.n_hosts > 1 else HashStore()
    try:
        dist.init_process_group(
            backend, store=store, rank=identity.rank, world_size=identity.n_hosts, timeout=timeout
        )
    except DistNetworkError as error:
        raise PeerLostError(f"rank 0 was lost while the process group was formed: {error}") from error


def _join_launched(backend: str, timeout: timedelta) -> None:
    """Form the group by torchrun's variables, under names of each start.

    After a restart by torchrun, its store may still hold values of the earlier processes, such as gloo's addresses.
    """
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore(f"restart/{count_restarts() or 0}", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except DistNetworkError as error:
        raise PeerLostError(
            f"rank 0's launcher, which has the store, was lost while the process group was formed: {error}"
        ) from error


def _prepare_tpu() -> None:
    """Turn SPMD on if this process is its host's only one. Raises ProcessGroupError if hosts are missing."""
    importlib.import_module("torch_xla.distributed.xla_backend")  # This registers xla://.
    runtime: Any = importlib.import_module("torch_xla.runtime")
    alone_on_host = not dist.is_torchelastic_launched() and runtime.local_process_count() == 1
    if alone_on_host and not runtime.is_spmd():
        runtime.use_spmd()
    if not Identity.present(os.environ):
        return
    n_hosts, n_seen = Identity.from_env(os.environ).n_hosts, runtime.process_count()
    if alone_on_host and n_seen < n_hosts:
        missing = [name for name in ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES") if name not in os.environ]
        because = f"; {' and '.join(missing)} not set in the environment" if missing else ""
        raise ProcessGroupError(
            f"the job has {n_hosts} hosts, but the TPU runtime sees {n_seen}{because}. GKE sets these variables in "
            "pods that request google.com/tpu; elsewhere set them in the template"
        )
