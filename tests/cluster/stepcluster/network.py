"""The one cable between the machine and a cluster. The machine gets an interface and a route, and nothing else."""

from pathlib import Path

from stepcluster.errors import CommandError
from stepcluster.layout import Layout, choose_block, parse_routes
from stepcluster.machine import run, wait_until
from stepcluster.processes import Namespaces

INNER_INTERFACE = "uplink"
INTERFACES = Path("/sys/class/net")
END_TIMEOUT_S = 60.0
GONE = ("Cannot find device", "No such device")
"""What `ip` says of an interface that isn't there: by its name, and by the number that it had for that."""


def free_block() -> int:
    """Return the number of an address block that nothing on this machine is routed to."""
    return choose_block(parse_routes(Path("/proc/net/route").read_text(encoding="utf-8")))


def connect(layout: Layout, namespaces: Namespaces) -> None:
    """Machine and cluster reach each other, pods and service addresses included.

    There is no way out of the cluster: a pod that tries is told at once that the network is unreachable. The cable goes
    away with the cluster's network namespace.
    """
    outer, prefix = layout.host_interface, layout.pod_network(0).prefixlen
    peer = ["peer", "name", INNER_INTERFACE, "netns", str(namespaces.pid)]
    run(["ip", "link", "add", outer, "type", "veth", *peer])
    run(["ip", "address", "add", f"{layout.host_address}/{prefix}", "dev", outer])
    run(["ip", "link", "set", outer, "up"])
    for words in (
        ["link", "set", "lo", "up"],
        ["address", "add", f"{layout.address}/{prefix}", "dev", INNER_INTERFACE],
        ["link", "set", INNER_INTERFACE, "up"],
    ):
        run(namespaces.enter(["ip", *words]))
    run(["ip", "route", "add", str(layout.network), "via", str(layout.address)])


def disconnect(layout: Layout) -> None:
    """Remove the machine's end of the cable at once, instead of when the kernel gets to it."""
    interface = INTERFACES / layout.host_interface
    if not interface.exists():
        return
    try:
        run(["ip", "link", "delete", layout.host_interface])
    except CommandError as error:
        # The kernel removes it with the cluster's namespace, which may be after the look.
        if not any(words in str(error) for words in GONE):
            raise
    wait_until(lambda: not interface.exists(), f"the end of {interface.name}", timeout_s=END_TIMEOUT_S)
