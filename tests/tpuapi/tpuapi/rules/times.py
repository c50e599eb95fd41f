"""Times and durations in the JSON form of messages."""

from datetime import UTC, datetime

from tpuapi.core.errors import invalid


def read_duration_s(text: str) -> float:
    """Read a duration such as `3.5s`."""
    return float(text.removesuffix("s"))


def read_time(text: str, field: str) -> float:
    """Read an RFC 3339 time into seconds since 1970.

    Raises:
        ApiError: It is none; INVALID_ARGUMENT.
    """
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise invalid(field, f"'{text}' is no RFC 3339 time") from None


def write_time(seconds: float) -> str:
    """Write seconds since 1970 in RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
