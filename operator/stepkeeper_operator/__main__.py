"""Run the operator until it is stopped: `python -m stepkeeper_operator`."""

import asyncio
import logging
import socket
import sys

from stepkeeper_operator.errors import LeaseLostError
from stepkeeper_operator.logs import set_up_logging
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.startup import run_operator


def main() -> int:
    """Run the operator. Return 0 after SIGTERM or SIGINT, 1 if another operator took over."""
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
    sys.exit(main())
