"""Define the contract of operator and pods: exit codes, identity, settings, termination message, reports.

It imports the standard library only. Every value has one writer and one reader, on the two sides of a process boundary.
Both sides use this code: no other code spells these names again.
"""

from stepkeeper.contract.exits import END_RESERVE_S, Cause, EndKind, ExitCode, NoticeSource
from stepkeeper.contract.identity import Identity
from stepkeeper.contract.places import (
    CA_FILE_NAME,
    CONTAINER_NAME,
    COORDINATOR_PORT,
    LAUNCHER_VARIABLE,
    LOCAL_TIER_FOLDER,
    NOTICE_FILE,
    RUN_FOLDER,
    SETTINGS_FILE_NAME,
    SETTINGS_FOLDER,
    TERMINATION_FILE,
    TOKEN_FILE,
    TORCHRUN_VARIABLE,
    token_audience,
)
from stepkeeper.contract.report import (
    CommitPoint,
    Directive,
    Hang,
    Head,
    Report,
    ReportedCommit,
    ReportPhase,
    SlowestRank,
    TimeSpent,
)
from stepkeeper.contract.restarts import (
    FENCED,
    JUDGED_KINDS,
    STOPPED_KINDS,
    AttemptKind,
    RestartLimits,
    Verdict,
    is_disruption,
)
from stepkeeper.contract.settings import (
    AutoInterval,
    Best,
    BestMode,
    ContinuousInterval,
    Endpoint,
    EveryInterval,
    HangLimits,
    Interval,
    OnDisruption,
    Retention,
    Settings,
)
from stepkeeper.contract.termination import Termination
from stepkeeper.contract.wire import ContractError

__all__ = [
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
    "Hang",
    "HangLimits",
    "Head",
    "Identity",
    "Interval",
    "NoticeSource",
    "OnDisruption",
    "Report",
    "ReportPhase",
    "ReportedCommit",
    "RestartLimits",
    "Retention",
    "Settings",
    "SlowestRank",
    "Termination",
    "TimeSpent",
    "Verdict",
    "is_disruption",
    "token_audience",
]
