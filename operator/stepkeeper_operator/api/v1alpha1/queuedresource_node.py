"""Define the slices that a QueuedResource asks for, in the fields of its spec.node."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from stepkeeper_operator.api.base import SET, SpecPart

__all__ = [
    "AcceleratorConfig",
    "AcceleratorGeneration",
    "DataDisk",
    "DiskMode",
    "NetworkSpec",
    "NodeSpec",
    "SecretKeyRef",
    "ServiceAccountSpec",
]

Name63 = Annotated[str, Field(min_length=1, max_length=63)]
MetadataValue = Annotated[str, Field(max_length=65_536)]
LabelValue = Annotated[str, Field(max_length=63)]


class AcceleratorGeneration(StrEnum):
    """A TPU generation, as the Cloud TPU API names it."""

    V2 = "V2"
    V3 = "V3"
    V4 = "V4"
    V5LITE_POD = "V5LITE_POD"
    V5P = "V5P"
    V6E = "V6E"


class DiskMode(StrEnum):
    READ_WRITE = "ReadWrite"
    READ_ONLY = "ReadOnly"


class AcceleratorConfig(SpecPart):
    """A slice by its generation and topology."""

    type: AcceleratorGeneration
    """TPU generation: V2, V3, V4, V5LITE_POD, V5P or V6E."""

    topology: Annotated[str, Field(min_length=3, max_length=16)]
    """Chips along each side of the slice: 4x4, or 2x2x4."""


class NetworkSpec(SpecPart):
    """Network of the hosts."""

    network: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """VPC network, by its name or its path. Unset: the project's default network."""

    subnetwork: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Subnetwork, by its name or its path."""

    external_ips: bool = False
    """Give each host an external address. Without one, the subnetwork needs Private Google Access or a NAT."""

    can_ip_forward: bool = False
    """Let hosts send packets with other addresses than their own: some pod networks need it."""


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
    """One key of a Secret in the namespace of the resource."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the Secret."""

    key: Annotated[str, Field(min_length=1, max_length=253)] = "startup-script"
    """Key in the Secret."""


class DataDisk(SpecPart):
    """A persistent disk that is attached to the hosts."""

    source_disk: Annotated[str, Field(min_length=1, max_length=256)]
    """Path of the disk: projects/<project>/zones/<zone>/disks/<disk>."""

    mode: DiskMode = DiskMode.READ_ONLY
    """ReadOnly, or ReadWrite where there is one slice: the cloud attaches a disk to one writer only."""


class NodeSpec(SpecPart):
    """The TPU slices that are requested. The Cloud TPU API calls a slice a node; each of its hosts becomes a node of
    the cluster.
    """

    union: ClassVar = ("acceleratorType", "acceleratorConfig")

    accelerator_type: Annotated[str, Field(min_length=2, max_length=32)] | None = None
    """Generation and size in the words of the Cloud TPU API: v5litepod-16, v4-32, v6e-8. Exactly one of this and
    acceleratorConfig."""

    accelerator_config: AcceleratorConfig | None = None
    """Generation and topology. Exactly one of this and acceleratorType."""

    runtime_version: Annotated[str, Field(min_length=1, max_length=128)]
    """Software image of the hosts: v2-alpha-tpuv5, tpu-ubuntu2204-base."""

    count: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of slices. Either all of them are granted or none is."""

    id_prefix: Annotated[str, Field(min_length=1, max_length=40)] | None = None
    """Beginning of the names of the cloud nodes. Unset: the name of the cloud resource."""

    network: NetworkSpec | None = None
    """Network of the hosts."""

    service_account: ServiceAccountSpec | None = None
    """Identity of the hosts. Unset: the project's default service account of Compute Engine."""

    labels: Annotated[dict[str, LabelValue], Field(max_length=48)] = Field(default_factory=dict)
    """Labels of the cloud nodes. The operator adds stepkeeper-cluster, -namespace, -name and -uid; no key
    of yours may begin with stepkeeper-."""

    tags: Annotated[tuple[Name63, ...], Field(max_length=64, json_schema_extra=SET)] = ()
    """Network tags of the hosts, for firewall rules."""

    metadata: Annotated[dict[str, MetadataValue], Field(max_length=64)] = Field(default_factory=dict)
    """Metadata of the hosts. The operator adds stepkeeper-node-labels: the labels that each host's kubelet has to join
    with. No key of yours may begin with stepkeeper-."""

    startup_script_secret_ref: SecretKeyRef | None = None
    """Script that every host runs at its start, and by which it joins the cluster. It is read when the cloud resource
    is created."""

    data_disks: Annotated[tuple[DataDisk, ...], Field(max_length=8)] = ()
    """Persistent disks that are attached to every host."""

    secure_boot: bool = False
    """Let the hosts boot only software that is signed (Shielded VM). Policies of an organization may require it."""

    autocheckpoint_enabled: bool | None = None
    """Before maintenance, the cloud sends SIGTERM and waits up to 5 minutes for the training to save. Unset: true with
    tier guaranteed, false with spot and bestEffort. With those two it can be true: the API takes it, and they are
    maintained too; it does nothing against a preemption. Only version v2alpha1 of the Cloud TPU API has it."""
