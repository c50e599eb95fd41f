"""Define the contract of operator and pods: exit codes, identity, settings, termination message, reports.

It imports the standard library only. Every value has one writer and one reader, on the two sides of a process boundary.
Both sides use this code: no other code spells these names again.
"""

from stepkeeper.contract.exits import END_RESERVE_S, Cause, EndKind, ExitCode, NoticeSource
from stepkeeper.contract.identity import Identity
from stepkeeper.contract.places import (
    ATTEMPT_FOLDER_VARIABLE,
    CA_FILE_NAME,
    CONTAINER_NAME,
    COORDINATOR_PORT,
    LAUNCHER_VARIABLE,
    LOCAL_TIER_FOLDER,
    NOTICE_FILE,
    RUN_FOLDER,
    SETTINGS_FILE_NAME,
    SETTINGS_FOLDER,
    SUPERVISOR_VARIABLE,
    TERMINATION_FILE,
    TOKEN_FILE,
    TORCHRUN_VARIABLE,
    token_audience,
)
from stepkeeper.contract.rehearsal import Rehearsal
from stepkeeper.contract.report import (
    CommitPoint,
    Directive,
    Head,
    Report,
    ReportedCommit,
    ReportPhase,
    SlowestRank,
)
from stepkeeper.contract.restarts import (
    FENCED,
    JUDGED_KINDS,
    STOPPED_KINDS,
    AttemptKind,
    RestartLimits,
    Verdict,
    is_disruption,
    judge_exit,
)
from stepkeeper.contract.settings import (
    AutoInterval,
    Best,
    BestMode,
    ContinuousInterval,
    Endpoint,
    EveryInterval,
    Interval,
    OnDisruption,
    Retention,
    Settings,
)
from stepkeeper.contract.termination import Termination
from stepkeeper.contract.wire import ContractError

__all__ = [
    "ATTEMPT_FOLDER_VARIABLE",
    "CA_FILE_NAME",
    "CONTAINER_NAME",
    "COORDINATOR_PORT",
    "END_RESERVE_S",
    "FENCED",
    "JUDGED_KINDS",
    "LAUNCHER_VARIABLE",
    "LOCAL_TIER_FOLDER",
    "NOTICE_FILE",
    "RUN_FOLDER",
    "SETTINGS_FILE_NAME",
    "SETTINGS_FOLDER",
    "STOPPED_KINDS",
    "SUPERVISOR_VARIABLE",
    "TERMINATION_FILE",
    "TOKEN_FILE",
    "TORCHRUN_VARIABLE",
    "AttemptKind",
    "AutoInterval",
    "Best",
    "BestMode",
    "Cause",
    "CommitPoint",
    "ContinuousInterval",
    "ContractError",
    "Directive",
    "EndKind",
    "Endpoint",
    "EveryInterval",
    "ExitCode",
    "Head",
    "Identity",
    "Interval",
    "NoticeSource",
    "OnDisruption",
    "Rehearsal",
    "Report",
    "ReportPhase",
    "ReportedCommit",
    "RestartLimits",
    "Retention",
    "Settings",
    "SlowestRank",
    "Termination",
    "Verdict",
    "is_disruption",
    "judge_exit",
    "token_audience",
]
