"""Carry an error from one process to another as JSON, and raise it there as the same class."""

import traceback
from typing import Any

from stepkeeper import errors
from stepkeeper.errors import CompanionError, StepkeeperError

__all__ = ["decode_error", "encode_error"]


def encode_error(error: BaseException, *, with_traceback: bool = False) -> dict[str, str]:
    """Encode `error` so that another process can raise it.

    Args:
        error: The error to encode.
        with_traceback: Also encode its traceback as text.

    Returns:
        A JSON object with `kind` (the class's name), `message`, and `traceback` if asked for.

    """
    raw = {"kind": type(error).__name__, "message": str(error)}
    if with_traceback:
        raw["traceback"] = "".join(traceback.format_exception(error))
    return raw


def decode_error(raw: dict[str, Any]) -> Exception:
    """Rebuild the error that another process encoded.

    Args:
        raw: A JSON object that `encode_error` made.

    Returns:
        An error of the same class if the class is in `stepkeeper.errors`, else a CompanionError that names the
            class.

    """
    kind = getattr(errors, raw["kind"], None)
    if isinstance(kind, type) and issubclass(kind, StepkeeperError):
        return kind(raw["message"])
    return CompanionError(f"{raw['kind']}: {raw['message']}\n{raw.get('traceback', '')}".rstrip())
