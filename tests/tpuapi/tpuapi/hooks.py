"""A command that is run when something happens to a node, so that a test can start a machine for each."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpuapi.core.values import EventKind, NodeEvent, NodeState

TIMEOUT_S = 600.0
COMING_BACK = (
    NodeState.REPAIRING,
    NodeState.STOPPING,
    NodeState.STOPPED,
    NodeState.RESTARTING,
    NodeState.REIMAGING,
)
"""States of a node whose machines are off for a while."""
TIMED_OUT = 124
NOT_STARTED = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class HookRun:
    """One run of the command that has ended."""

    event: str
    node_id: str
    worker_id: int
    exit_code: int
    output: str


class CommandHook:
    """Run a command for each worker of a node, for one event of the node after the other.

    The README says what the command finds in its environment. Its failure is printed, kept in `runs`, and changes
    nothing for the service.

    Args:
        command: The command with its arguments.
        folder: Where scripts, metadata and output are written to, a folder for each life of a node.
        timeout_s: The command is killed after so long.
        max_nodes: Run it for at most so many nodes at once, those that are ready first; None: for all.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        timeout_s: float = TIMEOUT_S,
        *,
        max_nodes: int | None = None,
    ) -> None:
        self._command = tuple(command)
        self._folder = folder
        self._timeout_s = timeout_s
        self._max_nodes = max_nodes
        self._with_machines: set[tuple[str, int]] = set()
        self.admin = ""
        """The side door's address, for the command."""
        self._last: dict[str, asyncio.Task[None]] = {}
        self.runs: list[HookRun] = []

    def __call__(self, event: NodeEvent) -> None:
        """Run the command after those for earlier events of the node have ended."""
        if not self._has_machines(event):
            return
        before = self._last.get(event.node.name)
        self._last[event.node.name] = asyncio.create_task(self._run_after(before, event))

    def _has_machines(self, event: NodeEvent) -> bool:
        """Decide whether the node is one of those that the command is run for. Once it is gone for good, another is."""
        if self._max_nodes is None:
            return True
        life = (event.node.name, event.node.number)
        if event.kind is EventKind.READY and len(self._with_machines) < self._max_nodes:
            self._with_machines.add(life)
        known = life in self._with_machines
        if event.kind is EventKind.GONE and event.node.state not in COMING_BACK:
            self._with_machines.discard(life)
        return known

    async def settle(self) -> None:
        """Wait until all commands that were started have ended."""
        await asyncio.gather(*self._last.values())

    async def stop(self) -> None:
        """Kill the commands that run."""
        for task in self._last.values():
            task.cancel()
        await asyncio.gather(*self._last.values(), return_exceptions=True)

    async def _run_after(self, before: asyncio.Task[None] | None, event: NodeEvent) -> None:
        if before is not None:
            await before
        workers = range(event.node.accelerator.n_hosts)
        environment = {**os.environ, **self._environment(event)}
        await asyncio.gather(*(self._run(event, worker, environment) for worker in workers))

    async def _run(self, event: NodeEvent, worker: int, environment: dict[str, str]) -> None:
        addresses = event.node.addresses
        own = {
            "TPU_WORKER_ID": str(worker),
            "TPU_WORKER_ADDRESS": addresses[worker] if worker < len(addresses) else "",
        }
        output = self._folder_of(event) / f"{event.kind.value}-{worker}.log"
        run = HookRun(
            event=event.kind.value,
            node_id=event.node.node_id,
            worker_id=worker,
            exit_code=await self._execute({**environment, **own}, output),
            output=output.read_text(encoding="utf-8", errors="replace"),
        )
        self.runs.append(run)
        if run.exit_code:
            print(f"hook: {run}", file=sys.stderr, flush=True)

    async def _execute(self, environment: dict[str, str], output: Path) -> int:
        """Run the command and return its exit code; what it leaves running may go on, and write on."""
        with output.open("wb") as stream:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    env=environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=stream,
                    stderr=asyncio.subprocess.STDOUT,
                )
            except OSError as error:
                stream.write(f"{self._command[0]}: {error}\n".encode())
                return NOT_STARTED
            try:
                return await asyncio.wait_for(process.wait(), self._timeout_s)
            except TimeoutError:
                stream.write(f"killed after {self._timeout_s} s\n".encode())
                return TIMED_OUT
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    def _folder_of(self, event: NodeEvent) -> Path:
        folder = self._folder / f"{event.node.node_id}-{event.node.number}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _environment(self, event: NodeEvent) -> dict[str, str]:
        node = event.node
        folder = self._folder_of(event)
        metadata_file = folder / "metadata.json"
        metadata_file.write_text(json.dumps(dict(node.metadata)), encoding="utf-8")
        return {
            "TPU_EVENT": event.kind.value,
            "TPU_REASON": event.reason,
            "TPU_DEADLINE_S": "" if event.deadline is None else str(event.deadline - event.at),
            "TPU_PROJECT": node.location.project,
            "TPU_ZONE": node.location.zone,
            "TPU_NODE": node.name,
            "TPU_NODE_ID": node.node_id,
            "TPU_NODE_NUMBER": str(node.number),
            "TPU_QUEUED_RESOURCE": node.queued_resource,
            "TPU_ACCELERATOR_TYPE": node.accelerator.type,
            "TPU_N_WORKERS": str(node.accelerator.n_hosts),
            "TPU_CHIPS_PER_HOST": str(node.accelerator.n_chips // node.accelerator.n_hosts),
            "TPU_ADDRESSES": ",".join(node.addresses),
            "TPU_ADMIN": self.admin,
            "TPU_METADATA_FILE": str(metadata_file),
            "TPU_STARTUP_SCRIPT": _script(folder, "startup-script", event),
            "TPU_SHUTDOWN_SCRIPT": _script(folder, "shutdown-script", event),
        }


def _script(folder: Path, key: str, event: NodeEvent) -> str:
    """Write a script of the node's metadata into a file that can be run; return its path, or nothing."""
    script = event.node.metadata.get(key)
    if not script:
        return ""
    path = folder / key
    path.write_text(script, encoding="utf-8")
    path.chmod(0o700)
    return str(path)
