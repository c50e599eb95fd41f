"""Connect to the Cloud TPU API where the kind is on. Elsewhere nothing of google's client is imported."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stepkeeper_operator.cloud_tpu.cloud import CloudTPU
from stepkeeper_operator.settings import OperatorSettings

__all__ = ["connect_cloud"]


@asynccontextmanager
async def connect_cloud(settings: OperatorSettings) -> AsyncIterator[CloudTPU | None]:
    """Yield the client of the Cloud TPU API, and close it afterwards. Yield None where the settings have it off."""
    if not settings.cloud_tpu_enabled:
        yield None
        return
    from stepkeeper_operator.cloud_tpu.client import GoogleCloudTPU

    cloud = GoogleCloudTPU(endpoint=settings.cloud_tpu_endpoint, insecure=settings.cloud_tpu_insecure)
    try:
        yield cloud
    finally:
        await cloud.close()
