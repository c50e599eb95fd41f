"""Define the slices that a QueuedResource requests: the fields of its spec.slices."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from stepkeeper_operator.api.accelerators import Accelerator
from stepkeeper_operator.api.base import SET, SpecPart

__all__ = ["DataDisk", "DiskMode", "NetworkSpec", "SecretKeyRef", "ServiceAccountSpec", "SlicesSpec"]

Name63 = Annotated[str, Field(min_length=1, max_length=63)]
MetadataValue = Annotated[str, Field(max_length=65_536)]
LabelValue = Annotated[str, Field(max_length=63)]


class DiskMode(StrEnum):
    READ_WRITE = "ReadWrite"
    READ_ONLY = "ReadOnly"


class NetworkSpec(SpecPart):
    network: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """VPC network, by its name or its path. Unset: the project's default network."""

    subnetwork: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Subnetwork, by its name or its path."""

    external_ips: bool = False
    """Give each host an external address. Without one, the subnetwork needs Private Google Access or a NAT."""

    can_ip_forward: bool = False
    """Let hosts send packets with source addresses other than their own, as some pod networks require."""


class ServiceAccountSpec(SpecPart):
    """Identity of the hosts."""

    email: Annotated[str, Field(min_length=3, max_length=254)]
    """Email of the service account that the hosts run as."""

    scopes: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        Field(max_length=32, json_schema_extra=SET),
    ] = ("https://www.googleapis.com/auth/cloud-platform",)
    """OAuth scopes of its tokens on the hosts."""


class SecretKeyRef(SpecPart):
    """One key of a Secret in the resource's namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the Secret."""

    key: Annotated[str, Field(min_length=1, max_length=253)] = "startup-script"
    """Key in the Secret."""


class DataDisk(SpecPart):
    """A persistent disk that is attached to the hosts."""

    source_disk: Annotated[str, Field(min_length=1, max_length=256)]
    """Path of the disk: projects/<project>/zones/<zone>/disks/<disk>."""

    mode: DiskMode = DiskMode.READ_ONLY
    """ReadOnly, or ReadWrite with a single slice: the cloud attaches a disk to one writer only."""


class SlicesSpec(SpecPart):
    """The TPU slices that are requested. Each of their hosts becomes a node of the cluster."""

    accelerator: Accelerator
    """TPU generation: v4, v5e, v5p or v6e, as in spec.placement.tpu of a job. v7x is rejected: only GKE has it."""

    topology: Annotated[str, Field(min_length=3, max_length=16)]
    """Chips along each side of one slice: 4x4 for v5e and v6e, 2x2x4 for v4 and v5p."""

    image: Annotated[str, Field(min_length=1, max_length=128)]
    """TPU software version of the hosts: tpu-ubuntu2204-base for v4, v2-alpha-tpuv5-lite for v5e, v2-alpha-tpuv5 for
    v5p, v2-alpha-tpuv6e for v6e."""

    count: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of slices. Either all of them are granted or none is."""

    name_prefix: Annotated[str, Field(min_length=1, max_length=40)] | None = None
    """Prefix of the slices' names. Unset: the name of the cloud resource."""

    network: NetworkSpec | None = None
    """Network of the hosts."""

    service_account: ServiceAccountSpec | None = None
    """Identity of the hosts. Unset: the project's default service account of Compute Engine."""

    labels: Annotated[dict[str, LabelValue], Field(max_length=48)] = Field(default_factory=dict)
    """Labels of the slices in the cloud. The operator adds stepkeeper-cluster, -namespace, -name and -uid; other keys
    must not begin with stepkeeper-."""

    tags: Annotated[tuple[Name63, ...], Field(max_length=64, json_schema_extra=SET)] = ()
    """Network tags of the hosts, for firewall rules."""

    metadata: Annotated[dict[str, MetadataValue], Field(max_length=64)] = Field(default_factory=dict)
    """Metadata of the hosts. The operator adds stepkeeper-node-labels: the labels that each host's kubelet has to set
    when it joins. Other keys must not begin with stepkeeper-."""

    startup_script_secret_ref: SecretKeyRef | None = None
    """Script that every host runs at its start to join the cluster. The operator reads it when it creates the cloud
    resource."""

    data_disks: Annotated[tuple[DataDisk, ...], Field(max_length=8)] = ()
    """Persistent disks that are attached to every host."""

    secure_boot: bool = False
    """Boot the hosts with signed software only (Shielded VM). An organization policy may require it."""

    autocheckpoint_enabled: bool | None = None
    """Before maintenance, the cloud sends SIGTERM and waits up to 5 minutes for the training to save. Unset: true with
    tier guaranteed, false with spot and bestEffort. It can be true with those two as well, but it has no effect on
    preemptions."""
