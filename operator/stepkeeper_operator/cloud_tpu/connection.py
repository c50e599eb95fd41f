"""Connect to the Cloud TPU API if QueuedResources are enabled, and count the requests to it.

Google's client is imported only if they are.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from stepkeeper_operator.cloud_tpu.cloud import CloudTPU, CloudTPUError
from stepkeeper_operator.settings import OperatorSettings

__all__ = ["connect_cloud", "count_requests"]


@asynccontextmanager
async def connect_cloud(settings: OperatorSettings) -> AsyncIterator[CloudTPU | None]:
    """Yield the client of the Cloud TPU API, and close it afterwards. Yield None if the settings disable it."""
    if not settings.cloud_tpu_enabled:
        yield None
        return
    from stepkeeper_operator.cloud_tpu.client import GoogleCloudTPU

    cloud = GoogleCloudTPU(endpoint=settings.cloud_tpu_endpoint, insecure=settings.cloud_tpu_insecure)
    try:
        yield cloud
    finally:
        await cloud.close()


def count_requests(cloud: CloudTPU, count: Callable[[str, str], None]) -> CloudTPU:
    """Report each request of `cloud` to `count`: the API's name of its method, and the answer's gRPC code.

    A list counts once, however many pages it has.
    """
    return cast(CloudTPU, _Counting(cloud, count))


class _Counting:
    def __init__(self, cloud: CloudTPU, count: Callable[[str, str], None]) -> None:
        self._cloud = cloud
        self._count = count

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._cloud, name)
        # The methods of CloudTPU have the API's names, except for one.
        words = "update_node" if name == "set_node_labels" else name
        method = "".join(word.capitalize() for word in words.split("_"))

        async def counted(*args: Any, **options: Any) -> Any:
            try:
                answer = await request(*args, **options)
            except CloudTPUError as error:
                self._count(method, error.code)
                raise
            # None means "not found", except from set_node_labels, which always returns None.
            found = answer is not None or name == "set_node_labels"
            self._count(method, "OK" if found else "NOT_FOUND")
            return answer

        return counted
