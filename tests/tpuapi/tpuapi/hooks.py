"""A command that is run when something happens to a node, so that a test can start a machine for each."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpuapi.nodes import NodeEvent, name_of

TIMEOUT_S = 600.0
TIMED_OUT = 124
NOT_STARTED = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class HookRun:
    event: str
    node_id: str
    worker_id: int
    exit_code: int
    output: str


class CommandHook:
    """Run a command for each worker of a node, for one event of the node after the other.

    `_describe` says what the command finds in its environment. Its failure is printed, kept in `runs`, and changes
    nothing for the service.

    Args:
        command: The command with its arguments.
        folder: Where metadata and output are written to, a folder for each life of a node.
        max_nodes: Run it for at most so many nodes at once, those that are ready first; None: for all.
    """

    def __init__(self, command: Sequence[str], folder: Path, *, max_nodes: int | None) -> None:
        self._command = tuple(command)
        self._folder = folder
        self._max_nodes = max_nodes
        self._with_machines: set[int] = set()
        self.admin = ""
        """The side door's address, for the command."""
        self._last: dict[str, asyncio.Task[None]] = {}
        self.runs: list[HookRun] = []

    def __call__(self, event: NodeEvent) -> None:
        """Run the command after those for earlier events of the node have ended."""
        if not self._has_machines(event):
            return
        name = name_of(event.node)
        self._last[name] = asyncio.create_task(self._run_after(self._last.get(name), event))

    def _has_machines(self, event: NodeEvent) -> bool:
        """Decide whether the node is one of those that the command is run for. Once it is gone for good, another is."""
        if self._max_nodes is None:
            return True
        if event.kind == "ready" and len(self._with_machines) < self._max_nodes:
            self._with_machines.add(event.number)
        known = event.number in self._with_machines
        if event.kind == "gone" and event.node.state != "REPAIRING":
            self._with_machines.discard(event.number)
        return known

    async def settle(self) -> None:
        """Wait until all commands that were started have ended."""
        await asyncio.gather(*self._last.values())

    async def stop(self) -> None:
        for task in self._last.values():
            task.cancel()
        await asyncio.gather(*self._last.values(), return_exceptions=True)

    async def _run_after(self, before: asyncio.Task[None] | None, event: NodeEvent) -> None:
        if before is not None:
            await before
        folder = self._folder / f"{event.node.id}-{event.number}"
        folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self._describe(event, folder)}
        workers = range(event.accelerator.n_hosts)
        await asyncio.gather(*(self._run(event, worker, environment, folder) for worker in workers))

    async def _run(self, event: NodeEvent, worker: int, environment: dict[str, str], folder: Path) -> None:
        output = folder / f"{event.kind}-{worker}.log"
        run = HookRun(
            event=event.kind,
            node_id=event.node.id,
            worker_id=worker,
            exit_code=await self._execute({**environment, "TPU_WORKER_ID": str(worker)}, output),
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
                return await asyncio.wait_for(process.wait(), TIMEOUT_S)
            except TimeoutError:
                stream.write(f"killed after {TIMEOUT_S} s\n".encode())
                return TIMED_OUT
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    def _describe(self, event: NodeEvent, folder: Path) -> dict[str, str]:
        node, accelerator = event.node, event.accelerator
        metadata_file = folder / "metadata.json"
        metadata_file.write_text(json.dumps(dict(event.metadata)), encoding="utf-8")
        return {
            "TPU_EVENT": event.kind,
            "TPU_REASON": event.reason,
            "TPU_DEADLINE_S": "" if event.grace_s is None else str(event.grace_s),
            "TPU_ZONE": node.place.zone,
            "TPU_NODE": name_of(node),
            "TPU_NODE_ID": node.id,
            "TPU_NODE_NUMBER": str(event.number),
            "TPU_ACCELERATOR_TYPE": accelerator.type,
            "TPU_N_WORKERS": str(accelerator.n_hosts),
            "TPU_CHIPS_PER_HOST": str(accelerator.n_chips // accelerator.n_hosts),
            "TPU_ADDRESSES": ",".join(node.addresses),
            "TPU_ADMIN": self.admin,
            "TPU_METADATA_FILE": str(metadata_file),
        }
