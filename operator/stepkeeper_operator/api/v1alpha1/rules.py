"""List the CEL rules of a CheckpointedTrainingJob that a schema can't express.

The message of each rule explains the valid form. The schema bounds the lists and strings that a rule reads, because
the API server rejects rules that could cost too much.
"""

from typing import Final

from stepkeeper.contract import CONTAINER_NAME, ExitCode, Identity
from stepkeeper_operator.api.accelerators import ACCELERATORS, topology_rules
from stepkeeper_operator.api.cel import CelRule, cel_list, listed
from stepkeeper_operator.api.v1alpha1.queuedresource_rules import NAME_MESSAGE, NAME_PATTERN

__all__ = ["RULES"]

_ENV_PREFIX: Final = Identity.variable("")
_ONE_CHIP: Final = ("1x1", "1x1x1")
_ONE_HOST: Final = ("1x1", "1x1x1", "2x2", "2x2x1")


def _host_sizes() -> str:
    """Return CEL for the host sizes of `self.accelerator`."""
    sizes = ", ".join(f"'{a.value}': {cel_list(facts.host_sizes)}" for a, facts in ACCELERATORS.items())
    return f"{{{sizes}}}[self.accelerator]"


_META: Final = (
    CelRule(
        at="",
        cel="self.metadata.name.matches('^[a-z]([-a-z0-9]{0,36}[a-z0-9])?$')",
        message="metadata.name: use 1 to 38 lower-case letters, digits and '-', beginning with a letter and not ending"
        " with '-'; the names of the job's pods are made from it",
    ),
)

_PLACEMENT: Final = (
    CelRule(
        at="spec.placement",
        cel="has(self.tpu) != has(self.hosts)",
        message="set exactly one of tpu: {accelerator, topology} and hosts: {count}",
    ),
    *topology_rules("spec.placement.tpu"),
    CelRule(
        at="spec.placement.tpu",
        cel=f"!has(self.chipsPerHost) || self.chipsPerHost in {_host_sizes()}",
        message="chipsPerHost: "
        + "; ".join(f"{', '.join(map(str, f.host_sizes))} for {a.value}" for a, f in ACCELERATORS.items()),
    ),
    CelRule(
        at="spec.placement.tpu",
        cel=f"!has(self.chipsPerHost) || self.chipsPerHost == 1 || (!(self.topology in {cel_list(_ONE_CHIP)})"
        " && (self.chipsPerHost <= 4 || self.topology != '2x2'))",
        message="chipsPerHost: a host has more chips than the whole topology; use a smaller number, or remove it",
    ),
    CelRule(
        at="spec.placement.tpu",
        cel=f"self.slices == 1 || (!(self.topology in {cel_list(_ONE_HOST)})"
        " && !(self.topology == '2x4' && has(self.chipsPerHost) && self.chipsPerHost == 8))",
        message="slices: more than one slice needs a topology of several hosts; use a larger topology, or slices: 1",
    ),
    CelRule(
        at="spec.placement.tpu",
        cel="!has(self.reservationName) || self.provisioning == 'Reserved'",
        message="reservationName: requires provisioning: Reserved; set that, or remove reservationName",
    ),
    CelRule(
        at="spec.placement.tpu",
        cel="!has(self.queuedResourceName) || (self.provisioning == 'OnDemand' && !has(self.reservationName))",
        message="queuedResourceName: the tier of the QueuedResource sets how its machines are bought; remove"
        " provisioning and reservationName",
    ),
    CelRule(
        at="spec.placement.tpu",
        cel="!has(self.queuedResourceName) || self.accelerator != 'v7x'",
        message="queuedResourceName: there are no queued resources of v7x, which only GKE has; remove it to run the job"
        " on the TPU nodes of the cluster",
    ),
    CelRule(
        at="spec.placement.tpu.queuedResourceName",
        cel=f"self.matches('{NAME_PATTERN}')",
        message=f"queuedResourceName: {NAME_MESSAGE}",
    ),
)

_TEMPLATE: Final = (
    CelRule(
        at="spec.template.spec",
        cel=f"self.containers.exists(c, c.name == '{CONTAINER_NAME}')",
        message=f"containers: there is no container named '{CONTAINER_NAME}'; give the training container that name",
    ),
    CelRule(
        at="spec.template.spec",
        cel="!has(self.restartPolicy) || self.restartPolicy == 'Never'",
        message="restartPolicy: remove it or use Never; all hosts of the job are restarted together",
    ),
    CelRule(
        at="spec.template.spec",
        cel=f"self.containers.all(c, c.name != '{CONTAINER_NAME}' || !has(c.env)"
        f" || c.env.all(e, !e.name.startsWith('{_ENV_PREFIX}')))",
        message=f"env: variables that begin with {_ENV_PREFIX} are set by the operator; use another name",
    ),
)

_POLICIES: Final = (
    CelRule(
        at="spec.checkpoint",
        cel=r"self.uri.matches('^(gs://[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9](/[^/\\s?#]+)*|file://(/[^/\\s?#]+)+)$')"
        r" && !self.uri.matches('/[.][.]?(/|$)')",
        message="uri: use gs://bucket/prefix or file:///absolute/path, without '/' at the end",
    ),
    CelRule(
        at="spec.checkpoint.interval",
        cel="[has(self.every), has(self.continuous), has(self.auto)].exists_one(given, given)",
        message="interval: set exactly one of every: {steps, seconds}, continuous: {minSeconds} and auto: {maxSeconds}",
    ),
    CelRule(
        at="spec.checkpoint.interval.every",
        cel="has(self.steps) || has(self.seconds)",
        message="every: set steps, seconds or both",
    ),
    CelRule(
        at="spec.restarts.fatalExitCodes",
        cel=f"self.all(code, !(code in {cel_list(tuple(map(int, ExitCode)))}))",
        message=f"fatalExitCodes: {listed(tuple(map(int, ExitCode)))} are reserved; use others",
    ),
    CelRule(
        at="spec.restarts",
        cel="!self.resetOnNewCheckpoint || self.maxFailures < self.maxStartsWithoutCheckpoint",
        message="maxFailures: this limit is never reached, because the job is suspended after"
        " maxStartsWithoutCheckpoint starts; use a smaller maxFailures, or a greater maxStartsWithoutCheckpoint",
    ),
    CelRule(
        at="spec.restarts.backoff",
        cel="self.initialSeconds <= self.maxSeconds",
        message="backoff: initialSeconds is greater than maxSeconds; use a greater maxSeconds",
    ),
)

RULES: Final = _META + _PLACEMENT + _TEMPLATE + _POLICIES
