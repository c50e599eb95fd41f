"""Plan which of the next requests of a cloud in memory go wrong, and whether they are carried out all the same."""

from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudTPUError, ErrorKind

__all__ = ["PlannedFaults"]


class PlannedFaults:
    """Keep the faults of each verb: list, get, get_node, operation, create, delete, label."""

    def __init__(self) -> None:
        self.faults: dict[str, list[tuple[CloudTPUError, bool]]] = {}
        self.alpha_error: CloudTPUError | None = None
        """The error that lists by v2alpha1 get; None: they are answered."""

        self._list_fault: tuple[CloudTPUError, bool] | None = None

    def fail_next(
        self, verb: str, kind: ErrorKind, code: str, message: str = "", *, carried_out: bool = False
    ) -> None:
        """Let the next request of a verb get an error."""
        self.faults.setdefault(verb, []).append((CloudTPUError(kind, code, message), carried_out))

    def _fail_list(self, version: ApiVersion) -> None:
        """Let a fault of lists hit both versions: v2 is asked where v2alpha1 fails."""
        if version is ApiVersion.V2ALPHA1:
            if self.alpha_error is not None:
                raise self.alpha_error
            self._list_fault = self._take_fault("list")
            fault = self._list_fault
        else:
            fault, self._list_fault = self._list_fault, None
            if self.alpha_error is not None:
                fault = self._take_fault("list")
        if fault is not None:
            raise fault[0]

    def _fail(self, verb: str) -> None:
        error = self._take_fault(verb)
        if error is not None:
            raise error[0]

    def _take_fault(self, verb: str) -> tuple[CloudTPUError, bool] | None:
        queue = self.faults.get(verb)
        return queue.pop(0) if queue else None
