"""Name the labels, annotations and taints that the operator sets on its objects and reads on others'."""

from typing import Final

__all__ = [
    "ACCELERATOR_LABEL",
    "ADOPT_ANNOTATION",
    "COMPLETION_INDEX_LABEL",
    "CORDONED_BY_ANNOTATION",
    "FIELD_OWNER",
    "HANG_CONDITION",
    "JOBSET_NUMBER_LABEL",
    "JOB_INDEX_LABEL",
    "JOB_NAME_LABEL",
    "JOB_UID_LABEL",
    "KUEUE_PREFIX",
    "MACHINES_HASH_ANNOTATION",
    "NODE_LOST_REASON",
    "NODE_POOL_LABEL",
    "NOT_READY_TAINT",
    "QUEUED_RESOURCE_LABEL",
    "QUEUED_RESOURCE_NAMESPACE_LABEL",
    "QUEUED_RESOURCE_UID_LABEL",
    "QUEUE_LABEL",
    "RESTART_ANNOTATION",
    "RESTART_ATTEMPT_LABEL",
    "SLICE_LABEL",
    "SPOT_LABEL",
    "STARTED_SETTINGS_ANNOTATION",
    "START_KEY_ANNOTATION",
    "TEMPLATE_HASH_ANNOTATION",
    "TOPOLOGY_LABEL",
    "TPU_RESOURCE",
    "UNREACHABLE_TAINT",
    "WORKER_JOB",
]

KUEUE_PREFIX: Final = "kueue.x-k8s.io/"
"""Prefix of the labels that configure Kueue for a JobSet."""

QUEUE_LABEL: Final = f"{KUEUE_PREFIX}queue-name"
"""Label on a JobSet: the LocalQueue that it waits in. Kueue's webhook may add it."""

FIELD_OWNER: Final = "stepkeeper"

JOB_UID_LABEL: Final = "stepkeeper.dev/job-uid"
"""Label on JobSet, Jobs and pods: uid of the CheckpointedTrainingJob. It selects watched objects; it proves nothing."""

JOB_NAME_LABEL: Final = "stepkeeper.dev/job-name"
JOBSET_NUMBER_LABEL: Final = "stepkeeper.dev/jobset-number"
"""Label on JobSet, Jobs and pods: number of the job's earlier JobSets."""

QUEUED_RESOURCE_UID_LABEL: Final = "stepkeeper.dev/queued-resource-uid"
"""Label on a node: uid of the QueuedResource that its Cloud TPU VM belongs to. Its own kubelet sets it."""

TEMPLATE_HASH_ANNOTATION: Final = "stepkeeper.dev/template-hash"
"""Annotation on the JobSet: digest of the spec.template and spec.placement that it was made from, as written.
Release 0.1.0 compares it."""

START_KEY_ANNOTATION: Final = "stepkeeper.dev/start-key"
"""Annotation on the JobSet: digests of what that template and placement mean, and of RESTART_ANNOTATION."""

STARTED_SETTINGS_ANNOTATION: Final = "stepkeeper.dev/started-settings"
"""Annotation on the job's ConfigMap: number of the running attempt and the settings that its pods have read, while the
job's differ."""

RESTART_ANNOTATION: Final = "stepkeeper.dev/restart"
"""Annotation that a user sets on a job: each new value asks for one save and restart."""

MACHINES_HASH_ANNOTATION: Final = "stepkeeper.dev/machines-hash"
"""Annotation on the JobSet: digest of the facts about the QueuedResource's machines that it was made from."""

ADOPT_ANNOTATION: Final = "stepkeeper.dev/adopt"
"""Annotation that a user sets on a QueuedResource: id of the cloud resource of its name to take over."""

CORDONED_BY_ANNOTATION: Final = "stepkeeper.dev/cordoned-by"
"""Annotation on a node: uid of the QueuedResource whose removal made the operator cordon it."""

HANG_CONDITION: Final = "stepkeeper.dev/Hang"
"""Pod condition: the pod is deleted because its training made no progress."""

NODE_LOST_REASON: Final = "NodeLost"
"""DisruptionTarget reason that the operator gives to pods that died with their node."""

WORKER_JOB: Final = "w"
"""Name of the JobSet's one replicatedJob."""

RESTART_ATTEMPT_LABEL: Final = "jobset.sigs.k8s.io/restart-attempt"
JOB_INDEX_LABEL: Final = "jobset.sigs.k8s.io/job-index"
COMPLETION_INDEX_LABEL: Final = "batch.kubernetes.io/job-completion-index"

NODE_POOL_LABEL: Final = "cloud.google.com/gke-nodepool"
"""Label of GKE's nodes: all hosts of a multi-host slice have the same value."""

SPOT_LABEL: Final = "cloud.google.com/gke-spot"
ACCELERATOR_LABEL: Final = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY_LABEL: Final = "cloud.google.com/gke-tpu-topology"
TPU_RESOURCE: Final = "google.com/tpu"
QUEUED_RESOURCE_LABEL: Final = "stepkeeper.dev/queued-resource"
"""Label on nodes: name of the QueuedResource that the machine belongs to. Its kubelet sets it when it joins."""

QUEUED_RESOURCE_NAMESPACE_LABEL: Final = "stepkeeper.dev/queued-resource-namespace"
"""Label on nodes: namespace of that QueuedResource."""

SLICE_LABEL: Final = "stepkeeper.dev/slice"
"""Label on nodes: cloud id of the slice that the host belongs to."""

NOT_READY_TAINT: Final = "node.kubernetes.io/not-ready"
UNREACHABLE_TAINT: Final = "node.kubernetes.io/unreachable"
