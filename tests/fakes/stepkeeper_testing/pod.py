"""Make the identity of a pod for tests."""

import dataclasses
from typing import Any, Final

from stepkeeper.contract import Identity

_IDENTITY: Final = Identity(
    namespace="default",
    job="lm",
    job_uid="uid-1",
    pod="lm-0",
    pod_uid="pod-uid",
    node="node-a",
    jobset_number=0,
    restart_attempt=0,
    slice_index=0,
    host_index=0,
    n_slices=1,
    hosts_per_slice=1,
    coordinator="localhost",
    grace_s=15,
)


def pod_identity(**fields: Any) -> Identity:
    """Return the identity of the only host of the first start of default/lm, with `fields` changed.

    Args:
        **fields: Fields of `stepkeeper.contract.Identity`.

    """
    return dataclasses.replace(_IDENTITY, **fields)


def pod_environ(identity: Identity) -> dict[str, str]:
    """Return the environment variables that the operator sets in the container of that identity."""
    return {
        identity.variable(each.name): str(getattr(identity, each.name))
        for each in dataclasses.fields(identity)
    }
