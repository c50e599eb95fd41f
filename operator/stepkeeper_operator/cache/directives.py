"""Keep what each job's next report is answered with."""

import time
from collections.abc import Callable

from stepkeeper.contract import Directive
from stepkeeper_operator.api.v1alpha1.trainingjob_status import SaveRequest

__all__ = ["DirectiveCache"]


class DirectiveCache:
    """Keep the open save request of every job. It can be lost: the status has it, and the next reconcile brings it."""

    def __init__(self, *, report_interval_s: int, clock: Callable[[], float] = time.time) -> None:
        self._report_interval_s = report_interval_s
        self._clock = clock
        self._save_requests: dict[str, SaveRequest] = {}

    def set_save_request(self, job_uid: str, request: SaveRequest | None) -> None:
        """Set the request that the job's reports are answered with; None: there is none."""
        if request is None:
            self._save_requests.pop(job_uid, None)
        else:
            self._save_requests[job_uid] = request

    def get_directive(self, job_uid: str) -> Directive:
        """Return the answer to a report of the job, with the time that is left now for a save."""
        request = self._save_requests.get(job_uid)
        if request is None:
            return Directive(report_interval_s=self._report_interval_s)
        return Directive(
            report_interval_s=self._report_interval_s,
            checkpoint_now=request.id,
            save_reason=request.reason,
            save_within_s=max(0, int(request.before - self._clock())),
        )

    def forget_job(self, job_uid: str) -> None:
        self._save_requests.pop(job_uid, None)
