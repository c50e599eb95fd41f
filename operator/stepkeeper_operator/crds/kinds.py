"""List the kinds whose CRDs are generated."""

from pathlib import Path
from typing import Final

from stepkeeper_operator.api.v1alpha1 import queuedresource, queuedresource_rules, rules, trainingjob
from stepkeeper_operator.crds.crd import Column, ResourceDefinition
from stepkeeper_operator.crds.pod_template import pod_template_schema
from stepkeeper_operator.crds.schema import Schema, replace_at

__all__ = ["KINDS", "QUEUED_RESOURCE", "TRAINING_JOB"]

_AGE: Final = Column(name="Age", type="date", path=".metadata.creationTimestamp")


def _with_pod_template(schema: Schema) -> Schema:
    return replace_at(schema, "spec.template", pod_template_schema())


TRAINING_JOB: Final = ResourceDefinition(
    kind=trainingjob.KIND,
    short_names=trainingjob.SHORT_NAMES,
    model=trainingjob.CheckpointedTrainingJob,
    columns=(
        Column(name="Phase", type="string", path=".status.phase", description="One word for the conditions."),
        Column(name="Step", type="integer", path=".status.progress.step", description="Last finished step."),
        Column(
            name="Committed",
            type="integer",
            path=".status.checkpoint.latest.step",
            description="Step that the next attempt resumes from.",
        ),
        Column(
            name="Restarts",
            type="integer",
            path=".status.restarts.total",
            description="Restarts of the job, for any cause.",
        ),
        _AGE,
    ),
    rules=rules.RULES,
    edit=_with_pod_template,
    opaque=frozenset({"spec.template"}),
    page=Path("docs/user/job-reference.md"),
    introduction="A training job that is restarted from its latest committed checkpoint, whatever interrupts it.",
)

QUEUED_RESOURCE: Final = ResourceDefinition(
    kind=queuedresource.KIND,
    short_names=queuedresource.SHORT_NAMES,
    model=queuedresource.QueuedResource,
    columns=(
        Column(name="State", type="string", path=".status.state", description="State of the cloud resource."),
        Column(
            name="Nodes",
            type="string",
            path=".status.joined",
            description="Hosts that are Ready nodes of this cluster, of the total.",
        ),
        Column(
            name="Autockpt",
            type="string",
            path=".status.autocheckpoint",
            description="Autocheckpoint as set in the cloud.",
        ),
        Column(
            name="Maintenance",
            type="string",
            path=".status.nextMaintenanceTime",
            description="Earliest start of announced maintenance.",
        ),
        _AGE,
    ),
    rules=queuedresource_rules.RULES,
    page=Path("docs/operations/queued-resource-reference.md"),
    introduction="Cloud TPU VMs, requested through the Cloud TPU queue, that join this cluster as nodes. The"
    " operator manages this kind only if the chart's `cloudTPU.enabled` is true.",
)

KINDS: Final = (TRAINING_JOB, QUEUED_RESOURCE)
