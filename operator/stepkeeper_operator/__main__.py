"""Run the operator until it is stopped: `python -m stepkeeper_operator`.

With the argument `check-uninstall`, check whether the operator may be uninstalled.
"""

import asyncio
import ctypes
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from typing_extensions import override

from stepkeeper_operator.cluster.client import connect
from stepkeeper_operator.errors import LeaseLostError
from stepkeeper_operator.queued_resources.uninstall import check_uninstall
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.startup import run_operator

CHECK_UNINSTALL: Final = "check-uninstall"
_OMITTED: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "settings"}
"""Attributes of a record that aren't printed as extras: logging's own, and kopf's whole settings."""

_M_MMAP_THRESHOLD: Final = -3  # of glibc's malloc.h
_LARGE_BYTES: Final = 128 * 1024
"""glibc's own threshold, which stays as it is once it is set."""

_KOPF_PREFIX: Final = "k8s_"  # of kopf's other extras: whole references to objects that its messages name


def main(arguments: Sequence[str] = ()) -> int:
    """Run the operator, or the check that `arguments` name. Return the exit status."""
    if not arguments:
        return _run()
    if list(arguments) == [CHECK_UNINSTALL]:
        return asyncio.run(_check_uninstall(OperatorSettings()))
    sys.stderr.write(f"usage: python -m stepkeeper_operator [{CHECK_UNINSTALL}]\n")
    return os.EX_USAGE


async def _check_uninstall(settings: OperatorSettings) -> int:
    cluster = await connect(settings.kubeconfig, settings.watch_namespaces)
    try:
        return await check_uninstall(cluster, sys.stderr)
    finally:
        await cluster.close()


def _run() -> int:
    """Return 0 after SIGTERM or SIGINT, 1 if another operator took over."""
    settings = OperatorSettings()
    if not settings.identity:
        settings = settings.model_copy(update={"identity": socket.gethostname()})
    _set_up_logging(settings.log_level)
    _return_large_buffers()
    try:
        asyncio.run(run_operator(settings))
    except LeaseLostError as error:
        logging.getLogger(__name__).error("stopped", extra={"error": str(error)})  # noqa: TRY400  # no bug: no traceback
        return 1
    return 0


def _return_large_buffers() -> None:
    """Have glibc return large buffers to the system once they are free, such as those of TLS connections.

    It would keep all of them that were ever needed at once, some 100 MB after a start with many jobs.
    """
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


class KeyValueFormatter(logging.Formatter):
    """Format a record as time=… level=… event="…" and its extras, each as key=value."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        pairs: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        extras = {key: value for key, value in vars(record).items() if key not in _OMITTED}
        pairs |= {key: value for key, value in extras.items() if not key.startswith(_KOPF_PREFIX)}
        line = " ".join(f"{key}={_quoted(value)}" for key, value in pairs.items())
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _set_up_logging(level: str) -> None:
    """Send all log records to standard error as key=value lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(KeyValueFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # kopf logs one line per object and event; the operator's own lines have more detail.
    logging.getLogger("kopf").setLevel(logging.WARNING)


def _quoted(value: object) -> str:
    """Render a value; as a JSON string if it is empty, or would look like several pairs."""
    text = str(value)
    return text if text and not set(text) & set(' "=\n\t') else json.dumps(text, ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
