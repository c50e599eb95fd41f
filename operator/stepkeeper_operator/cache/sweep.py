"""Finds what is gone although no watch said so: nobody speaks of an object that is deleted while a watch is broken."""

from stepkeeper_operator.cache.cache import Cache, JobKey
from stepkeeper_operator.cluster import JOBS, JOBSETS, NODES, PODS, TRAINING_JOBS, Cluster
from stepkeeper_operator.labels import JOB_UID

__all__ = ["forget_deleted_objects"]

_KINDS = ((TRAINING_JOBS, ""), (JOBSETS, JOB_UID), (JOBS, JOB_UID), (PODS, JOB_UID), (NODES, ""))


async def forget_deleted_objects(cluster: Cluster, cache: Cache) -> tuple[JobKey, ...]:
    """The cache holds no object that was gone before this call. Answers with the keys of the jobs that it concerns.

    Raises:
        ApiError: A kind can't be listed.
    """
    concerned: set[JobKey] = set()
    for resource, selector in _KINDS:
        # Known first: what is made while the list is on its way is in neither.
        known = cache.list_uids(resource.plural)
        concerned.update(cache.forget_objects(known - await cluster.list_uids(resource, selector)))
    return tuple(concerned)
