"""Write log lines of key=value pairs."""

import json
import logging
import time
from typing import Final

from typing_extensions import override

__all__ = ["KeyValueFormatter", "set_up_logging"]

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_LIBRARY_PREFIXES: Final = ("k8s_",)
"""kopf's own extras: whole object references, which its text names already."""


class KeyValueFormatter(logging.Formatter):
    """Format a record as time=… level=… event="…" and its extras, each as a pair that can be searched for."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        pairs: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        extras = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        pairs |= {key: value for key, value in extras.items() if not key.startswith(_LIBRARY_PREFIXES)}
        line = " ".join(f"{key}={_quoted(value)}" for key, value in pairs.items() if key != "settings")
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up_logging(level: str) -> None:
    """Send all log records to standard error as key=value lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(KeyValueFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # kopf writes one line per object and event; our own lines say more.
    logging.getLogger("kopf").setLevel(logging.WARNING)


def _quoted(value: object) -> str:
    text = str(value)
    return text if text and not set(text) & set(' "=\n\t') else json.dumps(text, ensure_ascii=False)
