"""Keep what each job's next report is answered with."""

from stepkeeper.contract import Directive

__all__ = ["DirectiveCache"]


class DirectiveCache:
    """Keep the open save request of every job. It can be lost: the status has it, and the next reconcile brings it."""

    def __init__(self, *, report_interval_s: int) -> None:
        self._report_interval_s = report_interval_s
        self._save_requests: dict[str, str] = {}

    def set_save_request(self, job_uid: str, request_id: str | None) -> None:
        """Set the request that the job's reports are answered with; None: there is none."""
        if request_id is None:
            self._save_requests.pop(job_uid, None)
        else:
            self._save_requests[job_uid] = request_id

    def get_directive(self, job_uid: str) -> Directive:
        """Return the answer to a report of the job."""
        return Directive(
            report_interval_s=self._report_interval_s, checkpoint_now=self._save_requests.get(job_uid)
        )

    def forget_job(self, job_uid: str) -> None:
        self._save_requests.pop(job_uid, None)
