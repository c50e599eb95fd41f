"""Identify a process by the variables that the operator sets in the trainer container."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from stepkeeper.contract.places import COORDINATOR_PORT, TERMINATION_FILE
from stepkeeper.contract.wire import ContractError

__all__ = ["Identity"]

_PREFIX: Final = "STEPKEEPER_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One process of one attempt of one job. The variable of field ``x`` is ``STEPKEEPER_X``."""

    namespace: str
    job: str
    job_uid: str
    """The job's metadata.uid; empty for `stepkeeper run`, whose processes claim a root as one started by hand does."""

    pod: str
    """The pod's metadata.name, from the downward API."""

    pod_uid: str
    node: str
    """The pod's spec.nodeName, from the downward API."""

    jobset_number: int
    """The number of JobSets that the operator had made for this job before this one."""

    restart_attempt: int
    """The value of JobSet's label jobset.sigs.k8s.io/restart-attempt."""

    slice_index: int
    """The value of JobSet's label jobset.sigs.k8s.io/job-index."""

    host_index: int
    """The index within the slice, from the label batch.kubernetes.io/job-completion-index."""

    n_slices: int
    hosts_per_slice: int
    coordinator: str
    """The DNS name of rank 0's host."""

    grace_s: int
    """The usable part of the pod's termination grace period in seconds (15 on Spot)."""

    coordinator_port: int = COORDINATOR_PORT
    """The port on which rank 0's host, or the launcher there, serves the rendezvous."""

    termination_file: str = TERMINATION_FILE
    """The container's terminationMessagePath, from which the kubelet reads the termination message."""

    @property
    def ordinal(self) -> tuple[int, int]:
        """The pair (jobset_number, restart_attempt) of this start. Later starts of the job compare greater."""
        return (self.jobset_number, self.restart_attempt)

    @property
    def attempt(self) -> str:
        """The ordinal as text: the JobSet's number and its restart count, as "2.1"."""
        return ".".join(map(str, self.ordinal))

    @property
    def rank(self) -> int:
        """The index of this host over all slices."""
        return self.slice_index * self.hosts_per_slice + self.host_index

    @property
    def n_hosts(self) -> int:
        """The number of hosts of the job."""
        return self.n_slices * self.hosts_per_slice

    @staticmethod
    def variable(field: str) -> str:
        """Return the name of the environment variable that carries ``field``."""
        return _PREFIX + field.upper()

    @classmethod
    def variables(cls) -> tuple[str, ...]:
        """List the variables that a template must not set itself."""
        return tuple(cls.variable(field.name) for field in dataclasses.fields(cls))

    @classmethod
    def present(cls, environ: Mapping[str, str]) -> bool:
        """Return whether the operator made this container."""
        return cls.variable("job_uid") in environ

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Read this process's identity from the environment. Raises ContractError that names the variable."""
        values: dict[str, str | int] = {}
        for field in dataclasses.fields(cls):
            name = cls.variable(field.name)
            if name not in environ and field.default is not dataclasses.MISSING:
                continue
            if name not in environ:
                raise ContractError(
                    f"environment variable {name} is missing; the operator sets it in the trainer container"
                )
            text = environ[name]
            if field.type is int and not text.isdecimal():
                raise ContractError(f"environment variable {name}={text!r} is not a whole number")
            values[field.name] = int(text) if field.type is int else text
        return cls(**values)  # type: ignore[arg-type]  # types follow the fields, one by one, above
