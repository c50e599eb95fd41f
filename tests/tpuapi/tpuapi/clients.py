"""The real clients of a service at an address, and requests for them.

The generated classes have no types: what comes from them is Any.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from google.cloud import tpu_v2, tpu_v2alpha1
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcAsyncIOTransport as V2Transport
from google.cloud.tpu_v2alpha1.services.tpu.transports import TpuGrpcAsyncIOTransport as AlphaTransport
from grpc import aio

from tpuapi.core.values import QueuedState
from tpuapi.fake import FakeTpu

PROJECT = "a-project"
ZONE = "us-west4-a"
PARENT = f"projects/{PROJECT}/locations/{ZONE}"


@dataclass(frozen=True, slots=True)
class Clients:
    """The asynchronous clients of both versions."""

    alpha: Any
    v2: Any


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[Clients]:
    """Connect real clients, in plaintext and without credentials, while the context lasts."""
    async with aio.insecure_channel(address) as channel:
        yield Clients(
            alpha=tpu_v2alpha1.TpuAsyncClient(transport=AlphaTransport(channel=channel)),
            v2=tpu_v2.TpuAsyncClient(transport=V2Transport(channel=channel)),
        )


def queued_name(queued_resource_id: str, parent: str = PARENT) -> str:
    return f"{parent}/queuedResources/{queued_resource_id}"


def node_name(node_id: str, parent: str = PARENT) -> str:
    return f"{parent}/nodes/{node_id}"


def node(**fields: Any) -> dict[str, Any]:
    """Make a node of one host; fields that are None are left out."""
    made = {"accelerator_type": "v5litepod-4", "runtime_version": "v2-alpha-tpuv5-lite", **fields}
    return {key: value for key, value in made.items() if value is not None}


def create_request(
    queued_resource_id: str,
    *,
    parent: str = PARENT,
    node_id: str = "",
    count: int = 0,
    spec: dict[str, Any] | None = None,
    request_id: str = "",
    **fields: Any,
) -> dict[str, Any]:
    """Make a request of v2alpha1 to create a queued resource.

    Args:
        queued_resource_id: Its id.
        parent: The parent of it and its nodes.
        node_id: The id of its only node; by default its own.
        count: Ask for so many nodes instead.
        spec: More fields of the node spec.
        request_id: The id of the request.
        fields: More fields of the queued resource.
    """
    names: dict[str, Any] = {"node_id": node_id or queued_resource_id}
    if count:
        names = {"multi_node_params": {"node_count": count}}
    node_spec = {"parent": parent, "node": node(), **names, **(spec or {})}
    return {
        "parent": parent,
        "queued_resource_id": queued_resource_id,
        "queued_resource": {"tpu": {"node_spec": [node_spec]}, **fields},
        "request_id": request_id,
    }


async def state_of(clients: Clients, queued_resource_id: str) -> str:
    """Return the state of a queued resource by its name."""
    resource = await clients.alpha.get_queued_resource(name=queued_name(queued_resource_id))
    return str(resource.state.state.name)


async def create_active(tpu: FakeTpu, clients: Clients, queued_resource_id: str, **fields: Any) -> None:
    """Create a queued resource, and let time pass until it is ACTIVE."""
    await clients.alpha.create_queued_resource(request=create_request(queued_resource_id, **fields))
    while tpu.queued_resource(queued_resource_id).state is not QueuedState.ACTIVE:
        tpu.step_to_next()
