"""Pods of this machine whose first process is `python -m stepkeeper.launch`, with a real torchrun below it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from free_ports import free_port

from stepkeeper.contract import EveryInterval, Interval, Settings
from stepkeeper_testing.pod import pod_environ, pod_identity

SCRIPTS: Final = Path(__file__).parents[1] / "integration" / "launching"
PATIENCE_S: Final = 150


@contextmanager
def launched(
    *command: str,
    env: dict[str, str] | None = None,
    output: Path | None = None,
    hosts: Path | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """The launcher with a command, whose output can be read. It knows the names that stand in the file `hosts`."""
    run = [sys.executable, "-m", "stepkeeper.launch", *command]
    with (output or Path(os.devnull)).open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            run if hosts is None else [*_with_hosts(hosts), *run],
            env={**os.environ, **(env or {})},
            stdout=stream if output else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        lose(process)


def _with_hosts(file: Path) -> list[str]:
    """What runs a command that reads this file in place of the machine's own. It becomes that process."""
    return ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(file)]


def lose(process: subprocess.Popen[str]) -> None:
    """End the launcher and all that it has started in one moment, as a pod whose machine is gone."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def until_running(process: subprocess.Popen[str], signs: list[Path]) -> None:
    """The workers have left their signs."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(sign.exists() for sign in signs):
        said = (signs[0].parent / "output").read_text()
        assert process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


def pods(tmp_path: Path, n_hosts: int, coordinator: str = "localhost") -> list[tuple[Path, dict[str, str]]]:
    """The folder of each pod's own files, and its environment; all train into one root."""
    port = free_port()
    made = []
    for host in range(n_hosts):
        folder = tmp_path / f"pod-{host}"
        folder.mkdir()
        settings = Settings(
            uri=(tmp_path / "root").as_uri(), interval=Interval(every=EveryInterval(steps=1000))
        )
        (folder / "settings.json").write_bytes(settings.to_json())
        identity = pod_identity(
            host_index=host,
            hosts_per_slice=n_hosts,
            coordinator=coordinator,
            coordinator_port=port,
            grace_s=60,
            termination_file=str(folder / "termination"),
        )
        made.append((folder, pod_environ(identity)))
    return made


def torchrun(folder: Path, case: str, *options: str) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
    return [*run, str(SCRIPTS / "worker.py"), str(folder), case]
