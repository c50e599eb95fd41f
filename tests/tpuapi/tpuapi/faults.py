"""Errors and delays that are put into calls on purpose."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tpuapi.core.errors import ApiError, Code, Status
from tpuapi.core.values import Json

ANY_METHOD = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An error for the next calls of a method."""

    method: str
    status: Status
    left: int | None
    """How many calls have it yet; None: all, until it is cleared."""
    after_commit: bool
    """The call is carried out, and its answer is lost."""
    resource: str
    """Only calls whose names contain this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    method: str
    seconds: float
    left: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    after_commit: bool
    come: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)


class Faults:
    """Hold what calls are going to suffer."""

    def __init__(self) -> None:
        self._errors: list[Fault] = []
        self._latencies: list[Latency] = []
        self._held: dict[str, _Held] = {}

    def add(self, fault: Fault) -> None:
        self._errors.append(fault)

    def delay(self, latency: Latency) -> None:
        self._latencies.append(latency)

    def hold(self, method: str, *, after_commit: bool) -> None:
        """Let no call of the method go on before `release`; after the commit, only its answer waits."""
        self._held.setdefault(method, _Held(after_commit=after_commit))

    async def until_held(self, method: str) -> None:
        """Wait until a call of the held method has come.

        Raises:
            LookupError: The method isn't held.
        """
        await self._held[method].come.wait()

    def release(self, method: str) -> None:
        held = self._held.pop(method, None)
        if held is not None:
            held.released.set()

    def clear(self) -> None:
        self._errors.clear()
        self._latencies.clear()
        for method in tuple(self._held):
            self.release(method)

    async def wait(self, method: str) -> None:
        """Take as long as calls of the method have to."""
        for index, latency in enumerate(self._latencies):
            if latency.method in (method, ANY_METHOD) and latency.left != 0:
                if latency.left is not None:
                    self._latencies[index] = replace(latency, left=latency.left - 1)
                await asyncio.sleep(latency.seconds)
                break
        await self.wait_held(method, after_commit=False)

    async def wait_held(self, method: str, *, after_commit: bool) -> None:
        """Wait while calls of the method are held at this point."""
        for name in (method, ANY_METHOD):
            held = self._held.get(name)
            if held is not None and held.after_commit == after_commit:
                held.come.set()
                await held.released.wait()

    def take(self, method: str, request: Json, *, after_commit: bool) -> ApiError | None:
        """Use up and return the error that this call has to suffer, if any."""
        for index, fault in enumerate(self._errors):
            if (
                fault.method in (method, ANY_METHOD)
                and fault.after_commit == after_commit
                and fault.left != 0
                and fault.resource in named_in(request)
            ):
                if fault.left is not None:
                    self._errors[index] = replace(fault, left=fault.left - 1)
                return ApiError(fault.status)
        return None


def named_in(request: Json) -> str:
    """Return the name of what a request is about."""
    if request.get("name"):
        return str(request["name"])
    if "node" in request and "name" in request["node"]:
        return str(request["node"]["name"])
    for collection, id_field in (("queuedResources", "queued_resource_id"), ("nodes", "node_id")):
        if request.get(id_field):
            return f"{request.get('parent', '')}/{collection}/{request[id_field]}"
    return str(request.get("parent", ""))


def status_of(code: str, message: str, reason: str, metadata: Mapping[str, str] | None) -> Status:
    """Make a status of a code's name.

    Raises:
        ValueError: There is no such code.
    """
    try:
        known = Code[code]
    except KeyError:
        raise ValueError(
            f"'{code}' is no code of google.rpc: {', '.join(each.name for each in Code)}"
        ) from None
    return Status(code=known, message=message or f"injected {code}", reason=reason, metadata=metadata or {})
