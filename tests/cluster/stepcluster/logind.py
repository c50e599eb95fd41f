"""The part of systemd-logind that a kubelet talks to: who must be waited for before the machine goes off."""

# Methods have the names that D-Bus knows them by, and their annotations are D-Bus type codes.
# ruff: noqa: F821, N802
# mypy: disable-error-code="name-defined, untyped-decorator"

import asyncio
import os

from dbus_next.aio.message_bus import MessageBus
from dbus_next.constants import PropertyAccess
from dbus_next.service import ServiceInterface, dbus_property, method, signal

BUS_SOCKET = "/run/dbus/system_bus_socket"
BUS_CONFIGURATION = f"""\
<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
  "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <listen>unix:path={BUS_SOCKET}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow send_destination="*" eavesdrop="true"/><allow receive_sender="*"/><allow own="*"/><allow user="*"/>
  </policy>
</busconfig>
"""
LONGEST_DELAY_S = 600
STOP_SERVICES_S = 5.0
"""A machine stops its services after the last one that it waited for, which takes seconds.

The kubelet lets go in the moment in which it kills what has not ended. It needs those seconds: it sees what became of
it a second later, and a busy machine takes longer to write it down.
"""


class LoginManager(ServiceInterface):
    """org.freedesktop.login1.Manager, as far as a kubelet uses it."""

    def __init__(self) -> None:
        super().__init__("org.freedesktop.login1.Manager")
        self._locks: list[tuple[int, int]] = []

    @dbus_property(access=PropertyAccess.READ)
    def InhibitDelayMaxUSec(self) -> "t":
        return LONGEST_DELAY_S * 1_000_000

    @method()
    def Inhibit(self, what: "s", who: "s", why: "s", mode: "s") -> "h":
        """Return a lock: the machine doesn't go off as long as the other end of the pipe is open."""
        ours, theirs = os.pipe()
        self._locks.append((ours, theirs))
        return theirs

    @signal()
    def PrepareForShutdown(self, starts: bool) -> "b":
        return starts

    async def released(self) -> None:
        """Everybody who held a lock has closed it, or the longest delay has passed."""
        loop = asyncio.get_running_loop()
        for ours, theirs in self._locks:
            # What was sent is a copy; with ours open too, the end of theirs would not show.
            os.close(theirs)
            closed = loop.create_future()
            loop.add_reader(ours, closed.set_result, None)
            try:
                await asyncio.wait_for(closed, LONGEST_DELAY_S)
            finally:
                loop.remove_reader(ours)
        await asyncio.sleep(STOP_SERVICES_S)


async def serve() -> LoginManager:
    """Put a login manager on the system bus, and return it."""
    bus = await MessageBus(bus_address=f"unix:path={BUS_SOCKET}", negotiate_unix_fd=True).connect()
    manager = LoginManager()
    bus.export("/org/freedesktop/login1", manager)
    await bus.request_name("org.freedesktop.login1")
    return manager
