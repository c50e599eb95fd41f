"""Run the operator until it is stopped: `python -m stepkeeper_operator`.

With the argument `check-uninstall`, say whether the operator may be uninstalled.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import Final

from stepkeeper_operator.cluster import connect
from stepkeeper_operator.errors import LeaseLostError
from stepkeeper_operator.logs import set_up_logging
from stepkeeper_operator.queued_resources.uninstall import check_uninstall
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.startup import run_operator

CHECK_UNINSTALL: Final = "check-uninstall"


def main(arguments: Sequence[str] = ()) -> int:
    """Run the operator, or the check that `arguments` ask for. Return the exit status."""
    if not arguments:
        return _run()
    if list(arguments) == [CHECK_UNINSTALL]:
        return asyncio.run(_check_uninstall(OperatorSettings()))
    sys.stderr.write(f"usage: python -m stepkeeper_operator [{CHECK_UNINSTALL}]\n")
    return os.EX_USAGE


async def _check_uninstall(settings: OperatorSettings) -> int:
    cluster = await connect(settings.kubeconfig)
    try:
        return await check_uninstall(cluster, sys.stderr)
    finally:
        await cluster.close()


def _run() -> int:
    """Return 0 after SIGTERM or SIGINT, 1 if another operator took over."""
    settings = OperatorSettings()
    if not settings.identity:
        settings = settings.model_copy(update={"identity": socket.gethostname()})
    set_up_logging(settings.log_level)
    try:
        asyncio.run(run_operator(settings))
    except LeaseLostError as error:
        logging.getLogger(__name__).error("stopped", extra={"error": str(error)})  # noqa: TRY400  # no bug: no traceback
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
