"""Decide what to do for one job. Pure and idempotent: once a decision is applied, the next one does nothing."""

from dataclasses import replace
from typing import Final

from stepkeeper.contract import CA_FILE_NAME
from stepkeeper_operator.api.v1alpha1.conditions import (
    Condition,
    ConditionType,
    ConditionUpdate,
    merge_conditions,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    CheckpointStatus,
    ProgressStatus,
    ResourcesStatus,
    TrainingJobStatus,
)
from stepkeeper_operator.facts.jobset import JobSet
from stepkeeper_operator.kinds.decision import compute_write_wait_s, find_soonest
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.training_jobs.attempts.following import update_history
from stepkeeper_operator.training_jobs.build.jobset import keep_jobset
from stepkeeper_operator.training_jobs.build.objects import KEPT_JOBSET, build_config_map
from stepkeeper_operator.training_jobs.decide.acceptance import (
    NAME_TAKEN,
    check_acceptance,
    find_kept_jobset,
    judge_after_end,
)
from stepkeeper_operator.training_jobs.decide.conditions import derive_conditions, derive_phase
from stepkeeper_operator.training_jobs.decide.events import derive_events
from stepkeeper_operator.training_jobs.decide.grace import derive_grace
from stepkeeper_operator.training_jobs.decide.running import compute_missing_s
from stepkeeper_operator.training_jobs.decide.save_requests import update_request
from stepkeeper_operator.training_jobs.decide.status import (
    clear_previous_attempt,
    derive_progress,
    mirror_storage,
    show_autocheckpoint,
)
from stepkeeper_operator.training_jobs.decide.terminating_pods import derive_stuck, find_lost_pods
from stepkeeper_operator.training_jobs.decision import (
    RELYING_ON_STATUS,
    Action,
    ApplyConfigMap,
    Decision,
    DeleteTrainingJob,
)
from stepkeeper_operator.training_jobs.observed import Observed, View, compute_recheck_s, find_end
from stepkeeper_operator.training_jobs.policy.next_step import plan_next
from stepkeeper_operator.training_jobs.policy.plan import Plan, stop_jobset

__all__ = ["decide_job"]

_MIN_WRITE_INTERVAL_S: Final = 1.0
_NAME_RECHECK_S: Final = 30.0


def decide_job(
    job: CheckpointedTrainingJob, observed: Observed, settings: OperatorSettings, *, now: float
) -> Decision:
    """Decide what to write, and when to look again."""
    view = View(job=job, observed=observed, settings=settings, now=now)
    if job.metadata.deletion_timestamp is not None:
        # A foreground deletion waits for all pods, including lost ones, which only the operator ends.
        given_up, look_s = find_lost_pods(view)
        return Decision(status=job.status, actions=given_up, requeue_after_s=look_s)
    if find_end(job) is not None:
        return _decide_finished(view)
    accepted = check_acceptance(job, observed)
    if not accepted.status:
        # Its running pods continue, but a JobSet of another owner is not touched.
        kept = find_kept_jobset(observed) if accepted.reason == Reason.UNREADABLE_SPEC else None
        own = _find_own_jobset(view)
        view = replace(view, observed=replace(observed, accepted=False, kept_jobset=kept, jobset=own))
    return _decide_unfinished(view, accepted)


def _decide_unfinished(view: View, accepted: ConditionUpdate) -> Decision:
    """Decide for a job that has not ended: plan its JobSet, derive its status from that, and list all actions.

    Each local name in `_s` is the time until something may change that no watch reports; None if nothing may.
    """
    jobset = view.jobset
    mirror = mirror_storage(view.job, view.observed, running=None if jobset is None else jobset.ordinal)
    plan = plan_next(view, update_history(view, new_commit=mirror.new_commit))
    ends = plan.end is not None
    progress = derive_progress(view, plan.history)
    updates, look_s = derive_conditions(view, plan, accepted, progress=progress)
    grace = () if ends else derive_grace(view, plan.history, mirror.checkpoint)
    stuck, stuck_s = derive_stuck(view)
    conditions = _update_conditions(view, (*updates, *grace, *stuck))
    checkpoint = clear_previous_attempt(view, mirror.checkpoint, plan.history)
    checkpoint, request_s = update_request(view, checkpoint, plan.history)
    checkpoint = show_autocheckpoint(checkpoint, view.machines)
    lost, lost_s = find_lost_pods(view)
    config = () if ends or not view.observed.may_start else _plan_config_map(view)
    ending = stop_jobset(jobset, queued=view.observed.is_queued) if ends else ()
    recheck_s = None if ends or jobset is None else compute_recheck_s(view.job, jobset, now=view.now)
    missing_s = compute_missing_s(view, plan.history)
    # Once missing pods count as a problem, only a watch event can change that.
    pods_s = missing_s if missing_s is not None and missing_s > 0 else None
    # A watch delivers an edit of the spec, but not that a name has become free.
    name_s = _NAME_RECHECK_S if accepted.reason in NAME_TAKEN else None
    probes_s = view.observed.probes_look_s
    waits_s = (plan.look_again_s, look_s, lost_s, recheck_s, pods_s, request_s, name_s, stuck_s, probes_s)
    draft = Decision(
        status=_compose_status(view, plan, conditions, checkpoint, progress=progress),
        actions=(*config, *plan.actions, *lost, *ending),
        requeue_after_s=find_soonest(*waits_s),
    )
    return _pace_write(view, draft)


def _update_conditions(view: View, updates: tuple[ConditionUpdate, ...]) -> tuple[Condition, ...]:
    before, generation = view.job.status.conditions, view.job.metadata.generation
    return merge_conditions(before, updates, ConditionType, generation=generation, now=view.now)


def _compose_status(
    view: View,
    plan: Plan,
    conditions: tuple[Condition, ...],
    checkpoint: CheckpointStatus | None,
    *,
    progress: ProgressStatus | None,
) -> TrainingJobStatus:
    placement = view.job.spec.placement
    resources = ResourcesStatus(
        chips=placement.n_chips,
        hosts=placement.n_hosts,
        job_set=plan.job_set,
        queued_resource_name=placement.queued_resource_name,
    )
    if view.observed.unreadable and view.job.status.resources is not None:  # `placement` may be a stand-in
        resources = view.job.status.resources.model_copy(update={"job_set": plan.job_set})
    return TrainingJobStatus(
        observed_generation=view.job.metadata.generation,
        phase=derive_phase(conditions, view.jobset, plan.history),
        conditions=conditions,
        checkpoint=checkpoint,
        attempts=plan.history.attempts,
        restarts=plan.history.restarts,
        progress=progress,
        resources=resources,
        next_start_time=plan.history.next_start_time,
        operator=plan.history.operator,
    )


def _plan_config_map(view: View) -> tuple[ApplyConfigMap, ...]:
    if view.observed.leftover is not None:
        return ()  # it may be a ConfigMap of another owner; no pod is created before it is gone
    observed = view.observed
    known = {} if observed.config_map is None else observed.config_map.data
    jobset = known.get(KEPT_JOBSET)
    if observed.accepted and not (view.is_on_queued_resource and view.machines is None):
        unreachable_s = view.settings.unreachable_toleration_s
        jobset = keep_jobset(view.job, unreachable_s=unreachable_s, machines=view.machines)
    manifest = build_config_map(view.job, view.settings, observed.ca_pem, jobset=jobset)
    if not observed.accepted:
        manifest["data"] = {**known, CA_FILE_NAME: observed.ca_pem}
    return () if known == manifest["data"] else (ApplyConfigMap(manifest=manifest),)


def _find_own_jobset(view: View) -> JobSet | None:
    """Return the JobSet with the job's name if the job owns it."""
    jobset = view.jobset
    return jobset if jobset is not None and jobset.owner_uid == view.job.metadata.uid else None


def _decide_finished(view: View) -> Decision:
    """Decide for a job that has ended: show late commits and stuck pods, stop running pods, delete expired jobs."""
    mirror = mirror_storage(view.job, view.observed, running=None)
    stuck, stuck_s = derive_stuck(view)
    updates = (*judge_after_end(view), *stuck)
    update = {
        "checkpoint": mirror.checkpoint,
        "observed_generation": view.job.metadata.generation,
        "conditions": _update_conditions(view, updates) if updates else view.job.status.conditions,
    }
    status = view.job.status.model_copy(update=update)
    ended_at, ttl_s = find_end(view.job), view.job.spec.ttl_seconds_after_finished
    lost, lost_s = find_lost_pods(view)
    stop = stop_jobset(_find_own_jobset(view), queued=view.observed.is_queued)
    actions: tuple[Action, ...] = (*lost, *stop)
    left_s = None if ttl_s is None or ended_at is None else ended_at + ttl_s - view.now
    if left_s is not None and left_s <= 0:
        actions, left_s = (DeleteTrainingJob(),), None
    return Decision(
        status=status,
        write_status=status != view.job.status,
        actions=actions,
        events=derive_events(view.job.status, status),
        requeue_after_s=find_soonest(left_s, stuck_s, lost_s),
    )


def _pace_write(view: View, draft: Decision) -> Decision:
    """Write a changed status now, or postpone the write if it comes too soon after the last one."""
    if draft.status == view.job.status:
        return draft
    only_progress = _without_progress(view.job.status) == _without_progress(draft.status)
    interval_s = view.settings.progress_interval_s if only_progress else _MIN_WRITE_INTERVAL_S
    wait_s = compute_write_wait_s(interval_s, last_write_at=view.observed.last_write_at, now=view.now)
    # Actions that rely on the status need the write at once.
    relied_on = any(isinstance(action, RELYING_ON_STATUS) for action in draft.actions)
    if wait_s > 0 and not relied_on:
        return replace(draft, requeue_after_s=find_soonest(draft.requeue_after_s, wait_s))
    return replace(draft, write_status=True, events=derive_events(view.job.status, draft.status))


def _without_progress(status: TrainingJobStatus) -> TrainingJobStatus:
    """Remove the parts of the status that change while the training runs well: they are written less often."""
    checkpoint = status.checkpoint
    if checkpoint is not None:
        checkpoint = checkpoint.model_copy(update={"in_flight_step": None, "tail": None})
    attempts = status.attempts
    if attempts and attempts[-1].end is None:
        attempts = (*attempts[:-1], attempts[-1].model_copy(update={"to_step": None}))
    return status.model_copy(update={"progress": None, "checkpoint": checkpoint, "attempts": attempts})
