"""Errors and waits that a test puts into calls on purpose, and what was called."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudTPUError
from tpuapi.rules import RefusedError

T = TypeVar("T")

ANY_METHOD = "*"


@dataclass(slots=True, kw_only=True)
class LoggedCall:
    method: str
    version: ApiVersion
    resource: str
    """The name of what it is about."""
    code: str = ""
    """OK, or the code that the caller has got; empty while the call is held."""


@dataclass(slots=True)
class _Fault:
    method: str
    error: RefusedError
    left: int | None
    after_commit: bool
    resource: str
    version: ApiVersion | None

    def hits(self, call: LoggedCall) -> bool:
        return (
            self.left != 0
            and self.method in (call.method, ANY_METHOD)
            and self.version in (None, call.version)
            and self.resource in call.resource
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    after_commit: bool
    released: asyncio.Event = field(default_factory=asyncio.Event)


class Faults:
    """Answer calls as the faults allow."""

    def __init__(self) -> None:
        self.calls: list[LoggedCall] = []
        self._errors: list[_Fault] = []
        self._held: dict[str, _Held] = {}

    def inject_error(
        self,
        method: str,
        code: str,
        times: int | None = 1,
        *,
        message: str = "",
        after_commit: bool = False,
        resource: str = "",
        version: ApiVersion | None = None,
    ) -> None:
        """Let the next calls of a method fail.

        Args:
            method: Its name, such as CreateQueuedResource; `*` for all.
            code: A code's name, such as UNAVAILABLE.
            times: How many calls; None for all until `clear_faults`.
            message: What people are told.
            after_commit: The call is carried out all the same: only its answer is lost.
            resource: Only calls whose resource's name contains this.
            version: Only calls by this version of the API.
        """
        error = RefusedError(code, message or f"injected {code}")
        self._errors.append(_Fault(method, error, times, after_commit, resource, version))

    def hold(self, method: str, *, after_commit: bool = False) -> None:
        """Let calls of a method wait until `release`; after the commit, only their answers wait."""
        self._held.setdefault(method, _Held(after_commit=after_commit))

    def release(self, method: str) -> None:
        """Let the calls go on that wait."""
        held = self._held.pop(method, None)
        if held is not None:
            held.released.set()

    def clear_faults(self) -> None:
        """Take back all errors and holds."""
        self._errors.clear()
        for method in tuple(self._held):
            self.release(method)

    def forget_calls(self) -> None:
        self.calls.clear()

    def counts(self) -> Counter[str]:
        """Return how often each method was called, with whatever success."""
        return Counter(call.method for call in self.calls)

    def count(self, *methods: str) -> int:
        return sum(self.counts()[method] for method in methods)

    async def answer(self, method: str, version: ApiVersion, resource: str, carry_out: Callable[[], T]) -> T:
        """Carry a call out and return its answer, as the faults allow.

        Raises:
            CloudTPUError: The service refuses it, or a fault does.
        """
        call = LoggedCall(method=method, version=version, resource=resource)
        self.calls.append(call)
        try:
            await self._hold_up(call, after_commit=False)
            self._suffer(call, after_commit=False)
            answer = carry_out()
            self._suffer(call, after_commit=True)
            await self._hold_up(call, after_commit=True)
        except CloudTPUError as error:
            call.code = error.code
            raise
        call.code = "OK"
        return answer

    async def _hold_up(self, call: LoggedCall, *, after_commit: bool) -> None:
        held = self._held.get(call.method)
        if held is not None and held.after_commit == after_commit:
            await held.released.wait()

    def _suffer(self, call: LoggedCall, *, after_commit: bool) -> None:
        for fault in self._errors:
            if fault.after_commit == after_commit and fault.hits(call):
                fault.left = None if fault.left is None else fault.left - 1
                raise fault.error
