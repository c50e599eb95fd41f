"""Form the process group, and describe the place of this process in it."""

import importlib
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, HashStore  # type: ignore[attr-defined]  # torch does not list it
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from stepkeeper.contract import ContractError, ExitCode, Identity, Termination
from stepkeeper.distributed.devices import Hardware, find_hardware
from stepkeeper.distributed.launchers import Launcher, choose_launcher, is_launched, read_local_rank
from stepkeeper.distributed.meeting import meet
from stepkeeper.ending.before_manager import exit_at_early_notice
from stepkeeper.ending.message import count_restarts, write
from stepkeeper.errors import PeerLostError, ProcessGroupError
from stepkeeper.loggers import logger

__all__ = ["Membership", "init"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The place of this process among those that train together."""

    device: torch.device
    """The device to train on: `cuda:1` for the second process of a host with GPUs, `xla` for all that torch_xla has,
    `cpu` where there is nothing else.
    """

    rank: int
    """The number of this process, from 0 on."""

    world_size: int
    """The number of processes."""

    local_rank: int
    """The number of this process on its host, from 0 on."""


_log: Final = logger(__name__)
_TIMEOUT_S: Final = 1800.0
"""gloo's own. Hosts of one job start minutes apart, while images are pulled, and a first compilation takes as long."""


def init(*, timeout_s: float = _TIMEOUT_S) -> Membership:
    """Form the process group of the training, or find the one that is there already.

    Call it first, before `CheckpointManager`::

        this = stepkeeper.distributed.init()
        model.to(this.device)

    On a TPU the group is torch_xla's (`xla://`), over gloo; where this process is the only one on its host, SPMD is
    turned on. Elsewhere it is formed by torchrun's variables, or by those that the operator gives each pod. A process
    that nobody started with others becomes a group of one. Tensors on GPUs go over NCCL, those on the CPU over gloo.

    If SIGTERM comes to a pod while it waits for the others, or later on before there is a manager, the process ends
    with code 75: there is nothing to save. Where the program has a handler of its own, or torchrun has started it, that
    decides. If rank 0 goes away meanwhile, the others end with code 78: it has the cause.

    Args:
        timeout_s: Seconds for all processes to come, and for each collective later.

    Returns:
        Where this process stands among the others.

    Raises:
        ProcessGroupError: Not all processes came; or a variable is missing in the environment, or is no number.

    Ranks:
        All ranks call this. Where a group exists already, it changes nothing and waits for nobody.

    """
    _exit_at_notice()
    hardware = find_hardware()
    if not dist.is_initialized():
        try:
            _form(hardware, timeout_s)
        except PeerLostError as error:
            _leave(error)
        except ContractError as error:
            raise ProcessGroupError(str(error)) from error
        # torch raises these for all that goes wrong, and DistStoreError and others are of that class.
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ProcessGroupError):
                raise
            raise ProcessGroupError(f"the process group can't be formed: {error}") from error
    return Membership(
        device=hardware.device,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=read_local_rank(os.environ),
    )


def _exit_at_notice() -> None:
    """Have a notice end this process of a pod until there is a manager. A launcher of several ends them itself."""
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
        case Launcher.NOBODY:
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
        raise PeerLostError(f"rank 0 went away while the process group was formed: {error}") from error


def _join_launched(backend: str, timeout: timedelta) -> None:
    """Form the group by torchrun's variables.

    Where torchrun has started its processes anew, its store may still hold what those before have left, gloo's
    addresses among it. Each start has names of its own.
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
            f"the launcher that has the store, rank 0's, went away while the process group was formed: {error}"
        ) from error


def _leave(error: PeerLostError) -> NoReturn:
    """End the process for a lost peer, and say so in the pod's last word: a launcher above ends with another code."""
    _log.error("%s", error)
    if Identity.present(os.environ):
        identity = Identity.from_env(os.environ)
        rank = int(os.environ.get("RANK") or identity.rank)
        message = Termination(code=ExitCode.PEER_LOST, error=str(error), rank=rank)
        write(Path(identity.termination_file), message)
    sys.exit(ExitCode.PEER_LOST)


def _prepare_tpu() -> None:
    """Turn SPMD on where this process is its host's only one, and check that the TPU runtime sees all hosts.

    Raises:
        ProcessGroupError: It doesn't: each host would train for itself.

    """
    importlib.import_module("torch_xla.distributed.xla_backend")  # It registers xla://.
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
            f"the job has {n_hosts} hosts, the TPU runtime sees {n_seen}{because}. GKE sets these variables in pods "
            "that ask for google.com/tpu; elsewhere the template does"
        )
