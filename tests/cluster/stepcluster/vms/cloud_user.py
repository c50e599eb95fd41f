"""Somebody who asks a Cloud TPU API for machines by hand, and knows nothing of the operator."""

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from stepcluster.vms.tpu_cloud import PROJECT, ZONE
from stepkeeper_operator.cloud_tpu.client import GoogleCloudTPU
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudRequest, Place

T = TypeVar("T")

_PLACE: Final = Place(project=PROJECT, zone=ZONE)
_VERSION: Final = ApiVersion.V2ALPHA1
_NODE: Final = {"accelerator_type": "v5litepod-4", "runtime_version": "v2-alpha-tpuv5-lite"}


class CloudUser:
    """The user of the service that answers the API at an address, host:port."""

    def __init__(self, address: str) -> None:
        self._address = address

    def create(self, cloud_id: str, **node: Any) -> None:
        """Ask for a Spot node of one host; fields of the node are added or replaced."""
        request = CloudRequest(
            place=_PLACE,
            id=cloud_id,
            request_id=str(uuid.uuid4()),
            api_version=_VERSION,
            node_ids=(cloud_id,),
            node_id_prefix=None,
            node={**_NODE, **node},
            tier={"spot": {}},
            queueing={},
        )
        self._ask(lambda client: client.create_queued_resource(request))

    def delete(self, cloud_id: str) -> None:
        request_id = str(uuid.uuid4())
        self._ask(
            lambda client: client.delete_queued_resource(
                _PLACE, cloud_id, request_id=request_id, version=_VERSION
            )
        )

    def state(self, cloud_id: str) -> str:
        """Return the state of a queued resource; empty if it is gone."""
        found = self._ask(lambda client: client.get_queued_resource(_PLACE, cloud_id, _VERSION))
        return found.state if found else ""

    def _ask(self, call: Callable[[GoogleCloudTPU], Coroutine[Any, Any, T]]) -> T:
        async def ask() -> T:
            client = GoogleCloudTPU(endpoint=self._address, insecure=True)
            try:
                return await call(client)
            finally:
                await client.close()

        return asyncio.run(ask())
