"""Tell torchrun where it runs, by the variables that it reads in place of options. Pure."""

from collections.abc import Mapping

from stepkeeper.contract import Identity

__all__ = ["torchrun_variables"]


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun has to know of the job's hosts, except for what the environment says already.

    Args:
        environ: The environment of the container. Outside an operator's pod nothing follows from it.

    Raises:
        ContractError: The operator's variables aren't as the operator sets them.

    """
    if not Identity.present(environ):
        return {}
    identity = Identity.from_env(environ)
    variables = {
        "PET_NNODES": str(identity.n_hosts),
        "PET_NODE_RANK": str(identity.rank),
        "PET_MASTER_ADDR": identity.coordinator,
        "PET_MASTER_PORT": str(identity.coordinator_port),
    }
    return {name: value for name, value in variables.items() if name not in environ}
