"""Authenticate a report: follow the owners of the token's pod, by uid, up to the job. Trust no name in the body."""

from dataclasses import dataclass

from stepkeeper.contract import token_audience
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.endpoint.tokens import TokenPod, TokenVerifier
from stepkeeper_operator.errors import ReportRefusedError
from stepkeeper_operator.facts.jobset import JobSet
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["ReportAuthenticator", "ReportingAttempt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportingAttempt:
    """A reporting pod, and the attempt and the job that it belongs to."""

    job: RawObject
    job_uid: str
    ordinal: tuple[int, int]
    pod_uid: str


class ReportAuthenticator:
    """Follow the owners in the cache. A pod that is not in the cache yet is asked to report again.

    Any pod of the attempt may report: launchers such as torchrun put rank 0 on any host. An unknown sender gets 401, a
    pod that doesn't belong to the job 403, and a pod of an earlier attempt 409.
    """

    def __init__(self, cache: Cache, tokens: TokenVerifier) -> None:
        self._cache = cache
        self._tokens = tokens

    def check_claims(self, key: ObjectKey, token: str) -> None:
        """Check, without the API server, that the token claims to be for this job. Raises ReportRefusedError."""
        uid, _ = self._find_job(key)
        if not self._tokens.claims(token, token_audience(uid)):
            raise _not_of_this_job()

    async def authenticate(self, key: ObjectKey, token: str) -> ReportingAttempt:
        """Find out which attempt of the job reports. Raises ReportRefusedError for a pod of another one."""
        uid, job = self._find_job(key)
        bound = await self._tokens.verify(token, token_audience(uid))
        if bound is None:
            raise _not_of_this_job()
        if bound.namespace != key.namespace:
            raise ReportRefusedError(
                403, f"a pod of namespace {bound.namespace} can't report for a job of {key.namespace}"
            )
        pod = self._find_pod(bound)
        if pod.job_uid != uid:
            raise ReportRefusedError(403, f"pod {pod.name} doesn't belong to job {key.namespace}/{key.name}")
        ordinal = _check_attempt(pod, self._check_jobset(key, pod))
        return ReportingAttempt(job=job, job_uid=uid, ordinal=ordinal, pod_uid=pod.uid)

    def _find_job(self, key: ObjectKey) -> tuple[str, RawObject]:
        raw = self._cache.get_object(key)
        if raw is None:
            # Not 503: a job whose pods run is in the cache, because the operator has made its JobSet from there.
            raise ReportRefusedError(404, f"there is no CheckpointedTrainingJob {key.namespace}/{key.name}")
        return str(raw["metadata"]["uid"]), raw

    def _find_pod(self, bound: TokenPod) -> Pod:
        pod = self._cache.get_pod(bound.namespace, bound.name)
        if pod is None or pod.uid != bound.uid:
            # A token expires with its pod. So its review is cached (`tokens`), or the watch of pods is late.
            raise ReportRefusedError(
                503, f"pod {bound.name} with uid {bound.uid} is deleted or not known yet: report again later"
            )
        return pod

    def _check_jobset(self, key: ObjectKey, pod: Pod) -> JobSet:
        if pod.owner_uid is None:
            raise ReportRefusedError(403, f"pod {pod.name} has no owner")
        batch_job, jobset = self._cache.get_batch_job(pod.owner_uid), self._cache.get_jobset(key)
        if batch_job is None:
            text = f"the Job of pod {pod.name} is deleted or not known yet: report again later"
            raise ReportRefusedError(503, text)
        if jobset is None or jobset.uid != batch_job.owner_uid:
            raise ReportRefusedError(
                409, f"Job {batch_job.name} belongs to an earlier JobSet: stop reporting"
            )
        if jobset.owner_uid != pod.job_uid:
            raise ReportRefusedError(403, f"pod {pod.name} doesn't belong to job {key.namespace}/{key.name}")
        return jobset


def _not_of_this_job() -> ReportRefusedError:
    return ReportRefusedError(401, "the token is not valid for the audience of this job")


def _check_attempt(pod: Pod, jobset: JobSet) -> tuple[int, int]:
    if pod.ordinal is None:
        raise ReportRefusedError(403, f"pod {pod.name} lacks the labels of an attempt")
    # A greater ordinal means that the JobSet's watch is late.
    if pod.ordinal < jobset.ordinal:
        raise ReportRefusedError(
            409, f"pod {pod.name} belongs to attempt {pod.ordinal}, {jobset.ordinal} runs now: stop reporting"
        )
    return pod.ordinal
