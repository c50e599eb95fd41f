"""Find objects that are gone although no watch said so: deletions while a watch is broken are never announced."""

from stepkeeper_operator.cache.cache import Cache, JobKey
from stepkeeper_operator.cluster import BATCH_JOBS, JOBSETS, NODES, PODS, TRAINING_JOBS, Cluster
from stepkeeper_operator.labels import JOB_UID_LABEL

__all__ = ["forget_deleted_objects"]

_KINDS = (
    (TRAINING_JOBS, ""),
    (JOBSETS, JOB_UID_LABEL),
    (BATCH_JOBS, JOB_UID_LABEL),
    (PODS, JOB_UID_LABEL),
    (NODES, ""),
)


async def forget_deleted_objects(cluster: Cluster, cache: Cache) -> tuple[JobKey, ...]:
    """Remove from the cache every object that was gone before this call, and return the keys of its jobs.

    Raises:
        ApiError: A kind can't be listed.
    """
    concerned: set[JobKey] = set()
    for resource, selector in _KINDS:
        # Take the known uids first: an object made while the API server lists is then in neither set.
        known = cache.list_uids(resource.plural)
        concerned.update(cache.forget_objects(known - await cluster.list_uids(resource, selector)))
    return tuple(concerned)
