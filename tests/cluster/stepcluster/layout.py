"""Names, addresses and folders of one cluster. Pure: nothing here looks at the machine."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from stepcluster.errors import ClusterError

NAME_PATTERN = re.compile(r"[a-z][-a-z0-9]{0,19}")
"""Pattern of a cluster's name, which becomes part of folder and cgroup names."""

NODE_NAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")

FIRST_BLOCK = 128
N_BLOCKS = 64
"""Clusters get 10.128.0.0/16 to 10.191.0.0/16, each the first that nothing on the machine is routed to."""

API_PORT = 6443
GCS_PORT = 4443
JOBSET_WEBHOOK_PORT = 9443
JOBSET_HEALTH_PORT = 9081
KUEUE_WEBHOOK_PORT = 9444
KUEUE_HEALTH_PORT = 9082
ETCD_PORT = 2379
ETCD_PEER_PORT = 2380
KUBELET_PORT = 10250
KUBELET_HEALTH_PORT = 10380
METADATA_PORT = 10510
"""Of the first node; this port and the two before are followed by one for each further node."""
PROXY_HEALTH_PORT = 10640
PROXY_METRICS_PORT = 10641

N_NODES = 127
"""Nodes that a cluster can have: as many as there are networks for their pods."""
LONGEST_SOCKET_PATH = 107
"""Longest path that the kernel takes for a Unix socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The paths, addresses and ports of one cluster. Ports are fixed: a cluster has a network namespace of its own."""

    name: str
    block: int
    """Second byte of all addresses of the cluster."""
    folder: Path

    @property
    def network(self) -> IPv4Network:
        return IPv4Network(f"10.{self.block}.0.0/16")

    @property
    def host_address(self) -> IPv4Address:
        """The machine's end of the cable between machine and cluster."""
        return self.network[1]

    @property
    def address(self) -> IPv4Address:
        """The cluster's end: API server, kubelets and object storage listen here, seen alike from pods and machine."""
        return self.network[2]

    @property
    def service_network(self) -> IPv4Network:
        return IPv4Network(f"10.{self.block}.128.0/17")

    @property
    def api_service_address(self) -> IPv4Address:
        return self.service_network[1]

    @property
    def dns_service_address(self) -> IPv4Address:
        return self.service_network[10]

    def pod_network(self, node_number: int) -> IPv4Network:
        """Return the /24 of a node's pods. Block 0 holds the cable, the upper half holds the services."""
        if not 0 <= node_number < N_NODES:
            raise ClusterError(f"a cluster has at most {N_NODES} nodes, there is no number {node_number}")
        return IPv4Network(f"10.{self.block}.{node_number + 1}.0/24")

    @property
    def host_interface(self) -> str:
        return f"stepk{self.block}"

    @property
    def api_url(self) -> str:
        return f"https://{self.address}:{API_PORT}"

    @property
    def gcs_url(self) -> str:
        return f"http://{self.address}:{GCS_PORT}"

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def certificates(self) -> Path:
        return self.folder / "certificates"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    def node_folder(self, node: str) -> Path:
        return self.folder / "nodes" / node

    def cgroup_name(self, node: str) -> str:
        return f"stepkeeper-{self.name}-{node}"


def check_name(name: str) -> str:
    if not NAME_PATTERN.fullmatch(name):
        raise ClusterError(
            f"{name!r} can't be a cluster's name: use up to 20 lower-case letters, digits and hyphens, a letter first"
        )
    return name


def check_node_name(layout: Layout, name: str) -> str:
    if not NODE_NAME_PATTERN.fullmatch(name):
        raise ClusterError(
            f"{name!r} can't be a node's name: use up to 63 lower-case letters, digits and hyphens, a letter first"
        )
    longest = layout.node_folder(name) / "kubelet" / "device-plugins" / "kubelet.sock"
    if len(str(longest)) > LONGEST_SOCKET_PATH:
        raise ClusterError(
            f"node name {name!r} is too long: the kernel takes no Unix socket at {longest}; use a shorter name, or a"
            " shorter one for the cluster"
        )
    return name


def choose_block(routed: Iterable[IPv4Network]) -> int:
    """Choose the first block that overlaps with none of `routed`."""
    taken = [network for network in routed if network.prefixlen > 0]
    for block in range(FIRST_BLOCK, FIRST_BLOCK + N_BLOCKS):
        if not any(IPv4Network(f"10.{block}.0.0/16").overlaps(network) for network in taken):
            return block
    raise ClusterError(
        f"every network from 10.{FIRST_BLOCK}.0.0/16 to 10.{FIRST_BLOCK + N_BLOCKS - 1}.0.0/16 is routed somewhere "
        "already: take a cluster down"
    )


def parse_routes(proc_net_route: str) -> tuple[IPv4Network, ...]:
    networks = []
    for line in proc_net_route.splitlines()[1:]:
        fields = line.split()
        address = IPv4Address(int.from_bytes(bytes.fromhex(fields[1]), "little"))
        mask = IPv4Address(int.from_bytes(bytes.fromhex(fields[7]), "little"))
        networks.append(IPv4Network(f"{address}/{mask}"))
    return tuple(networks)
