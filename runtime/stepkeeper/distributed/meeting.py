"""Connect the pods of a job, by the variables that the operator set in their environment."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]  # torch does not list it
from torch.distributed.distributed_c10d import PrefixStore, Store

from stepkeeper.contract import Identity
from stepkeeper.errors import PeerLostError, ProcessGroupError
from stepkeeper.loggers import logger

__all__ = ["meet"]

_log: Final = logger(__name__)
_CALL_S: Final = 3.0
"""Seconds for one attempt to connect. Each resolves the name again: a recreated pod has another address."""

_CONNECT_S: Final = 3 * _CALL_S
"""Seconds that torch's store may take to connect. It doesn't handle signals meanwhile."""

_PAUSE_S: Final = 0.2
_LOG_EVERY_S: Final = 60.0
"""The interval at which a waiting process logs the missing hosts."""

_ALL: Final = "all"


def meet(identity: Identity, timeout_s: float) -> Store:
    """Wait for all hosts of the job, and return their common store.

    The wait consists of short ones, so that Python's signal handlers run in between. Raises ProcessGroupError, which
    names the hosts that didn't join in `timeout_s`, or PeerLostError: rank 0 was lost, with the store.
    """
    ends_s = time.monotonic() + timeout_s
    tcp_store = (_serve if identity.rank == 0 else _join)(identity, ends_s)
    # Values of an earlier start must not count for this one.
    store = PrefixStore(f"{identity.job_uid}/{identity.attempt}", tcp_store)
    try:
        store.set(_host(identity.rank), identity.pod)
        _await_all(identity, store, ends_s)
    except DistNetworkError as error:
        raise PeerLostError(
            f"rank 0 was lost while rank {identity.rank} waited for all hosts: {error}"
        ) from error
    return store


def _serve(identity: Identity, ends_s: float) -> TCPStore:
    """Open the store in this process, with retries: another process may still be leaving the port."""
    port = identity.coordinator_port
    complaint = f"rank 0 can't listen on port {port}"
    return _try(lambda: _open(_own_address(), port, ends_s, is_master=True), ends_s, complaint)


def _join(identity: Identity, ends_s: float) -> TCPStore:
    """Connect to the store in rank 0's pod."""
    name, port = identity.coordinator, identity.coordinator_port

    def connect() -> TCPStore:
        with socket.create_connection((name, port), timeout=_CALL_S) as connection:
            address = str(connection.getpeername()[0])
        return _open(address, port, ends_s, is_master=False)

    return _try(
        connect,
        ends_s,
        f"rank {identity.rank} can't reach rank 0 at {name} port {port}: check that its pod runs and calls "
        "stepkeeper.distributed.init() too, and that a NetworkPolicy allows traffic between the job's pods",
    )


def _open(address: str, port: int, ends_s: float, *, is_master: bool) -> TCPStore:
    left_s = max(_CALL_S, ends_s - time.monotonic())
    store = TCPStore(
        address,
        port,
        is_master=is_master,
        timeout=timedelta(seconds=min(left_s, _CONNECT_S)),
        wait_for_workers=False,
    )
    store.set_timeout(timedelta(seconds=left_s))
    return store


def _own_address() -> str:
    """Return the address at which other hosts reach this one, by resolving its own name, as works in a pod."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _try(attempt: Callable[[], TCPStore], ends_s: float, complaint: str) -> TCPStore:
    logged_s = time.monotonic()
    while True:
        try:
            return attempt()
        # torch's store raises its own RuntimeErrors, for a port in use for example.
        except (OSError, RuntimeError) as error:
            now_s = time.monotonic()
            if now_s >= ends_s:
                raise ProcessGroupError(f"{complaint} ({error})") from error
            if now_s - logged_s >= _LOG_EVERY_S:
                logged_s = now_s
                _log.warning("%s (%s); still trying", complaint, error)
        time.sleep(_PAUSE_S)


def _await_all(identity: Identity, store: Store, ends_s: float) -> None:
    """Wait until rank 0 has seen all hosts."""
    hosts = range(identity.n_hosts)
    awaited = [_host(rank) for rank in hosts] if identity.rank == 0 else [_ALL]
    logged_s = time.monotonic()
    while not store.check(awaited):
        now_s = time.monotonic()
        if now_s >= ends_s or now_s - logged_s >= _LOG_EVERY_S:
            logged_s = now_s
            missing = [str(rank) for rank in hosts if not store.check([_host(rank)])]
            text = (
                f"rank {identity.rank} waits for {len(missing)} of {len(hosts)} hosts: {', '.join(missing)}"
            )
            if now_s >= ends_s:
                raise ProcessGroupError(
                    f"{text}; check that their pods run and call stepkeeper.distributed.init()"
                )
            _log.warning("%s", text)
        time.sleep(_PAUSE_S)
    if identity.rank == 0:
        store.set(_ALL, "")


def _host(rank: int) -> str:
    return f"host/{rank}"
