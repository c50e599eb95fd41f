"""List the reasons of the conditions of both kinds. docs/operations/conditions.md explains each of them."""

from enum import StrEnum
from typing import Self

from typing_extensions import override

__all__ = ["Reason"]


class Reason(StrEnum):
    """The reason of a condition's status, in one word. Reasons of Kubernetes, Kueue or the cloud are in messages."""

    # Both kinds
    AS_EXPECTED = "AsExpected"
    SUSPENDED = "Suspended"
    FAILED = "Failed"
    UNKNOWN = "Unknown"
    UNKNOWN_FIELDS = "UnknownFields"
    UNREADABLE_SPEC = "UnreadableSpec"
    # CheckpointedTrainingJob: Accepted
    SPEC_ACCEPTED = "SpecAccepted"
    CONFIG_MAP_NAME_TAKEN = "ConfigMapNameTaken"
    FORBIDDEN = "Forbidden"
    JOB_SET_NAME_TAKEN = "JobSetNameTaken"
    NO_TRAINER = "NoTrainer"
    QUEUED_RESOURCE_IN_USE = "QueuedResourceInUse"
    QUEUED_RESOURCE_MISMATCH = "QueuedResourceMismatch"
    QUOTA_EXCEEDED = "QuotaExceeded"
    REJECTED = "Rejected"
    RESERVED_LABEL = "ReservedLabel"
    RESERVED_VARIABLE = "ReservedVariable"
    ROOT_IN_USE = "RootInUse"
    # QuotaReserved
    QUOTA_RESERVED = "QuotaReserved"
    WAITING_FOR_QUOTA = "WaitingForQuota"
    NOT_QUEUED = "NotQueued"
    NO_WORKLOAD = "NoWorkload"
    # Running
    ALL_PODS_RUN = "AllPodsRun"
    ENDED = "Ended"
    FINISHING = "Finishing"
    NO_JOB_SET = "NoJobSet"
    NO_PODS = "NoPods"
    POD_WAITING = "PodWaiting"
    STARTING = "Starting"
    STOPPING = "Stopping"
    TRAINER_ENDED = "TrainerEnded"
    # Reporting, Progressing
    REPORTS_RECEIVED = "ReportsReceived"
    NO_REPORTS = "NoReports"
    NO_REPORT_YET = "NoReportYet"
    NOT_RUNNING = "NotRunning"
    STEPS_ADVANCE = "StepsAdvance"
    ALL_STEPS_MADE = "AllStepsMade"
    NO_STEP_YET = "NoStepYet"
    PARTIALLY_FINISHED = "PartiallyFinished"
    STALLED = "Stalled"
    # GraceSufficient, PodStuck
    SAVE_FITS = "SaveFits"
    GRACE_TOO_SHORT = "GraceTooShort"
    NO_COMMIT_YET = "NoCommitYet"
    NOTHING_TO_SAVE = "NothingToSave"
    NODE_GONE = "NodeGone"
    NODE_NOT_READY = "NodeNotReady"
    NODE_SILENT = "NodeSilent"
    STILL_TERMINATING = "StillTerminating"
    # Suspended
    NOT_SUSPENDED = "NotSuspended"
    REQUESTED = "Requested"
    SUSPENDING = "Suspending"
    NO_NEW_CHECKPOINT = "NoNewCheckpoint"
    NODES_JOIN_TIMEOUT = "NodesJoinTimeout"
    QUEUED_RESOURCE_DELETING = "QueuedResourceDeleting"
    QUEUED_RESOURCE_NOT_FOUND = "QueuedResourceNotFound"
    QUEUED_RESOURCES_DISABLED = "QueuedResourcesDisabled"
    WAITING_FOR_NODES = "WaitingForNodes"
    WAITING_FOR_QUEUED_RESOURCE = "WaitingForQueuedResource"
    # Finished, Complete, Failed
    NOT_FINISHED = "NotFinished"
    COMPLETE = "Complete"
    ALL_PODS_SUCCEEDED = "AllPodsSucceeded"
    FATAL_EXIT_CODE = "FatalExitCode"
    MAX_DISRUPTIONS_REACHED = "MaxDisruptionsReached"
    MAX_FAILURES_REACHED = "MaxFailuresReached"
    ROOT_OWNED_BY_ANOTHER = "RootOwnedByAnother"
    TRAINING_DONE = "TrainingDone"
    # QueuedResource: Accepted
    ACCEPTED = "Accepted"
    ADOPTING = "Adopting"
    ALREADY_EXISTS = "AlreadyExists"
    EXPIRED = "Expired"
    NOTHING_TO_ADOPT = "NothingToAdopt"
    NOT_ANSWERED = "NotAnswered"
    NO_CREDENTIALS = "NoCredentials"
    OWNED_BY_OTHER = "OwnedByOther"
    REFUSED = "Refused"
    SPEC_MISMATCH = "SpecMismatch"
    STARTUP_SCRIPT_MISSING = "StartupScriptMissing"
    # Active: the states of the cloud resource, and the reasons of its removal
    ACTIVE = "Active"
    CREATING = "Creating"
    DELETING = "Deleting"
    GONE = "Gone"
    PENDING = "Pending"
    PROVISIONING = "Provisioning"
    WAITING_FOR_RESOURCES = "WaitingForResources"
    DELETED = "Deleted"
    PREEMPTED = "Preempted"
    QUOTA_EXHAUSTED = "QuotaExhausted"
    SPEC_CHANGED = "SpecChanged"
    VANISHED = "Vanished"
    # NodesJoined
    ALL_HOSTS_JOINED = "AllHostsJoined"
    CORDONED = "Cordoned"
    HOSTS_UNKNOWN = "HostsUnknown"
    JOINING = "Joining"
    JOIN_TIMEOUT = "JoinTimeout"
    NOT_ACTIVE = "NotActive"
    # Degraded, MaintenanceScheduled
    AUTOCHECKPOINT_MISMATCH = "AutocheckpointMismatch"
    CLOUD_UNREACHABLE = "CloudUnreachable"
    DELETION_BLOCKED = "DeletionBlocked"
    DUPLICATE_RESOURCE = "DuplicateResource"
    NODE_DELETION_REFUSED = "NodeDeletionRefused"
    RECREATIONS_EXHAUSTED = "RecreationsExhausted"
    SLICE_NOT_READY = "SliceNotReady"
    SLICE_UNHEALTHY = "SliceUnhealthy"
    MAINTENANCE_ANNOUNCED = "MaintenanceAnnounced"
    MAINTENANCE_ONGOING = "MaintenanceOngoing"
    NOT_REPORTED = "NotReported"
    OVER = "Over"

    @override
    @classmethod
    def _missing_(cls, value: object) -> Self:
        """Read a reason of another version in a status."""
        return cls(cls.UNKNOWN)
