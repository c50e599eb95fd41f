"""Errors and delays that a test puts into calls."""

from collections.abc import Mapping
from dataclasses import replace

from tpuapi.core import accelerators
from tpuapi.core.names import Location
from tpuapi.core.quota import quota_exceeded
from tpuapi.engine import Engine
from tpuapi.faults import Fault, Latency, status_of


class FaultControls:
    """Let calls fail, lose their answers, or take their time."""

    engine: Engine

    def inject_error(
        self,
        method: str,
        code: str,
        times: int | None = 1,
        *,
        after_commit: bool = False,
        message: str = "",
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        resource: str = "",
    ) -> None:
        """Let the next calls of a method fail.

        Args:
            method: Its name, such as CreateQueuedResource; `*` for all.
            code: A code's name, such as UNAVAILABLE.
            times: How many calls; None for all until `clear_faults`.
            after_commit: The call is carried out all the same: only its answer is lost.
            message: What people are told.
            reason: ErrorInfo's reason.
            metadata: ErrorInfo's metadata.
            resource: Only calls whose resource's name contains this.
        """
        status = status_of(code, message, reason, metadata)
        self.engine.faults.add(
            Fault(method=method, status=status, left=times, after_commit=after_commit, resource=resource)
        )

    def inject_quota_error(
        self, method: str, zone: str, accelerator: str, limit: int, times: int | None = 1
    ) -> None:
        """Let the next calls of a method fail as if a quota were exceeded, with all details."""
        location = Location("a-project", zone)
        status = quota_exceeded(location, accelerators.family_of(accelerator), limit, preemptible=False)
        self.engine.faults.add(
            Fault(method=method, status=status, left=times, after_commit=False, resource="")
        )

    def fail_deletions(self, code: str = "INTERNAL", times: int = 1, *, message: str = "") -> None:
        """Let the next deletions of queued resources be accepted, and their operations end with an error.

        What they were to delete stays as it is, and the same request under the same id is answered with them.
        """
        failures = (status_of(code, message, "", None),) * times
        self.engine.change(lambda w: replace(w, failing_deletions=(*w.failing_deletions, *failures)))

    def inject_latency(self, method: str, seconds: float, times: int | None = 1) -> None:
        """Let the next calls of a method take so many real seconds longer."""
        self.engine.faults.delay(Latency(method=method, seconds=seconds, left=times))

    def hold(self, method: str, *, after_commit: bool = False) -> None:
        """Let calls of a method wait until `release`.

        Args:
            method: Its name, such as CreateQueuedResource; `*` for all.
            after_commit: They are carried out at once, and only their answers wait.
        """
        self.engine.faults.hold(method, after_commit=after_commit)

    async def until_held(self, method: str) -> None:
        """Wait until a call of a held method has come."""
        await self.engine.faults.until_held(method)

    def release(self, method: str) -> None:
        self.engine.faults.release(method)

    def clear_faults(self) -> None:
        """Take back all errors, latencies and holds."""
        self.engine.faults.clear()
        self.engine.change(lambda w: replace(w, failing_deletions=()))
