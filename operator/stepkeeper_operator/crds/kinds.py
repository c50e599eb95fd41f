"""List the kinds whose CRDs are generated."""

from pathlib import Path
from typing import Final

from stepkeeper_operator.api.v1alpha1 import queuedresource, queuedresource_rules, rules, trainingjob
from stepkeeper_operator.crds.crd import Column, ResourceDefinition
from stepkeeper_operator.crds.pod_template import pod_template_schema
from stepkeeper_operator.crds.schema import Schema, replace_at

__all__ = ["KINDS", "QUEUED_RESOURCE", "TRAINING_JOB"]

_AGE: Final = Column("Age", "date", ".metadata.creationTimestamp")


def _with_pod_template(schema: Schema) -> Schema:
    return replace_at(schema, "spec.template", pod_template_schema())


TRAINING_JOB: Final = ResourceDefinition(
    kind=trainingjob.KIND,
    short_names=trainingjob.SHORT_NAMES,
    model=trainingjob.CheckpointedTrainingJob,
    columns=(
        Column("Phase", "string", ".status.phase", "One word for the conditions."),
        Column(
            "Step", "string", ".status.progress.display", "Last finished step, of totalSteps, or percent."
        ),
        Column(
            "Committed",
            "integer",
            ".status.checkpoint.latest.step",
            "Step that the next attempt resumes from.",
        ),
        Column("Last-Step", "date", ".status.progress.lastProgressTime", "Time since the last new step."),
        Column("Restarts", "integer", ".status.restarts.total", "Restarts of the job, for any cause."),
        Column("Why", "string", ".status.why", "Reason of the phase, or of a problem."),
        _AGE,
        Column("ETA", "string", ".status.progress.eta", "Estimated time to totalSteps.", 1),
        Column("Node", "string", ".status.restarts.lastNode", "Node where the last end began.", 1),
        Column("Last-Cause", "string", ".status.restarts.lastCause", "Cause of the last end.", 1),
    ),
    rules=rules.RULES,
    edit=_with_pod_template,
    opaque=frozenset({"spec.template"}),
    page=Path("docs/user/job-reference.md"),
)

QUEUED_RESOURCE: Final = ResourceDefinition(
    kind=queuedresource.KIND,
    short_names=queuedresource.SHORT_NAMES,
    model=queuedresource.QueuedResource,
    columns=(
        Column("State", "string", ".status.state", "State of the cloud resource."),
        Column(
            "Nodes", "string", ".status.joined", "Hosts that are Ready nodes of this cluster, of the total."
        ),
        Column("Autockpt", "string", ".status.autocheckpoint", "Autocheckpoint as set in the cloud."),
        Column(
            "Maintenance", "string", ".status.nextMaintenanceTime", "Earliest start of announced maintenance."
        ),
        _AGE,
    ),
    rules=queuedresource_rules.RULES,
    page=Path("docs/operations/queued-resource-reference.md"),
    note=" The operator manages this kind only if the chart's `cloudTPU.enabled` is true.",
)

KINDS: Final = (TRAINING_JOB, QUEUED_RESOURCE)
