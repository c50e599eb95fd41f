"""Find objects that are gone although no watch said so: deletions while a watch is broken are never announced."""

from http import HTTPStatus

from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cache.kinds import WatchedKind
from stepkeeper_operator.cluster import Cluster
from stepkeeper_operator.errors import ApiError

__all__ = ["forget_deleted_objects"]


async def forget_deleted_objects(cluster: Cluster, cache: Cache, kind: WatchedKind) -> tuple[ObjectKey, ...]:
    """Remove from the cache every object of the kind that was gone before this call.

    Returns:
        The keys of the jobs and QueuedResources that it concerns.

    Raises:
        ApiError: The kind can't be listed.
    """
    # Take the known uids first: an object made while the API server lists is then in neither set.
    known = cache.list_uids(kind.resource)
    try:
        present = await cluster.list_uids(kind.resource, kind.label_selector)
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND or not kind.removable:
            raise
        present = frozenset()
    return cache.forget_objects(known - present)
