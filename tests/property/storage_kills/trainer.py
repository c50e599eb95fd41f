"""A trainer, as a process forked from one that has torch in it already."""

import ctypes
import hashlib
import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from storage_kills.deadly import Fault, arm, was_killed
from storage_kills.spares import prepare_spares
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper import CheckpointManager, Options
from stepkeeper.errors import StepkeeperError

_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    folder: Path
    """Of this start: its ranks meet there, and say there what they do."""

    uri: str
    number: int
    """Of the start."""

    rank: int
    world_size: int
    steps: tuple[int, ...]
    restores: int | None = None
    """None: the latest."""

    goes_back: int | None = None
    """What is restored after that, under its claim."""

    last: int = 0
    """How many commits are kept; 0: all."""

    fault: Fault | None = None
    forks: bool = False
    """Its companions are forked, not started."""


def state_of(number: int, step: int) -> dict[str, Any]:
    chance = torch.Generator().manual_seed(1000 * number + step)
    return {
        "a": torch.randn(40, generator=chance),
        "b": torch.randint(-(2**31), 2**31 - 1, (30,), generator=chance, dtype=torch.int32).view(
            torch.float32
        ),
        "half": torch.randn(9, 5, generator=chance).to(torch.bfloat16),
        "number": number,
        "step": step,
    }


def digest(state: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name, value in state.items():
        found.update(name.encode())
        raw = (
            value.view(torch.uint8).numpy().tobytes()
            if isinstance(value, torch.Tensor)
            else repr(value).encode()
        )
        found.update(raw)
    return found.hexdigest()


def train(order: Order) -> None:
    """The whole life of a rank, from here to the end of the process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    said = os.open(order.folder / f"{order.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    if order.forks:
        # And one for a companion that is killed.
        killed = order.fault is not None and order.fault.victim == f"companion {order.rank}"
        prepare_spares(1 + killed)
    arm(order.rank, order.folder, order.fault)
    store = _join(order) if order.world_size > 1 else None
    state = state_of(-1, -1)
    with CheckpointManager(
        order.uri, save=10**9, keep=order.last or None, options=Options(stop_on_notice=False)
    ) as manager:
        if order.restores is None:
            manager.restore(state)
        else:
            manager.restore(state, order.restores)
        if order.goes_back is not None:
            manager.restore(state, order.goes_back)
        _say("restored", digest=digest(state))
        for step in order.steps:
            _save(manager, order.number, step)
        if order.rank == 0:
            # What comes after a commit has come to an end then.
            with suppress(StepkeeperError):
                manager._parts.companion.read_latest()
        # That the companion is gone may come out in the very next save, which is the one that it costs.
        if _goes_on(order, store) and not _save(manager, order.number, order.steps[-1] + 1):
            _save(manager, order.number, order.steps[-1] + 2)
    if store is not None:
        dist.destroy_process_group()


def _save(manager: CheckpointManager, number: int, step: int) -> bool:
    try:
        manager.save(step, state_of(number, step)).result()
    except StepkeeperError as error:
        _say("failed", step=step, why=repr(error))
        return False
    _say("committed", step=step)
    return True


def _goes_on(order: Order, store: Any) -> bool:
    """Somebody was killed, and the next save has to work: the same answer in all ranks."""
    if store is None:
        return was_killed(order.folder)
    if order.rank == 0:
        store.set("goes on", str(was_killed(order.folder)))
    return bool(store.get("goes on") == b"True")


def _join(order: Order) -> TCPStore:
    port_file = order.folder / "port"
    if order.rank == 0:
        store = TCPStore("localhost", 0, order.world_size, is_master=True, wait_for_workers=False)
        new = port_file.with_suffix(".new")
        new.write_text(str(store.port))
        new.rename(port_file)
    else:
        while not port_file.exists():
            time.sleep(0.002)
        store = TCPStore("localhost", int(port_file.read_text()), order.world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=order.rank, world_size=order.world_size)
    return store


def _say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)
