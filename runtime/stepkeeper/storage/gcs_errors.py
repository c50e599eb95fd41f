"""Convert the errors of Google's clients into errors that name the object, and say what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import requests
from google.api_core import exceptions as api_exceptions
from google.auth import exceptions as auth_exceptions
from google.cloud.storage.exceptions import DataCorruption

from stepkeeper.errors import NoAccessError, StorageError, TransientStorageError

__all__ = ["translated"]

_TRANSIENT: Final = (
    api_exceptions.TooManyRequests,
    api_exceptions.ServerError,
    api_exceptions.RetryError,
    auth_exceptions.TransportError,
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    DataCorruption,
    ConnectionError,
)
_LOG_IN: Final = (
    "In a cluster, give the pod a Kubernetes service account that may use the bucket (Workload Identity Federation). "
    "Elsewhere run 'gcloud auth application-default login', or set GOOGLE_APPLICATION_CREDENTIALS to a key's file"
)
_ROLE: Final = "roles/storage.objectUser"


@contextmanager
def translated(where: str, bucket: str, account: str | None = None) -> Iterator[None]:
    """Convert the client's errors into StorageErrors.

    Args:
        where: URI of the object that is worked on.
        bucket: The bucket's name.
        account: The service account that asks, if it is known.

    Raises:
        NoAccessError: No credentials, no permission, or no such bucket. The message says what to do about it.
        TransientStorageError: The service gave no answer, or asked to try later.
        StorageError: The service refuses for another reason.

    """
    try:
        yield
    except StorageError:
        raise
    except api_exceptions.NotFound as error:
        raise NoAccessError(
            f"{where}: there is no bucket {bucket!r} ({_reason(error)}). Correct the URI, or make the bucket: "
            f"gcloud storage buckets create gs://{bucket} --location=REGION"
        ) from error
    except api_exceptions.Unauthorized as error:
        raise NoAccessError(f"{where}: no valid credentials ({_reason(error)}). {_LOG_IN}") from error
    except api_exceptions.Forbidden as error:
        raise NoAccessError(
            f"{where}: not allowed ({_reason(error)}). {account or 'The service account'} needs the role {_ROLE} on "
            f"the bucket: gcloud storage buckets add-iam-policy-binding gs://{bucket} "
            f"--member=serviceAccount:{account or 'ACCOUNT'} --role={_ROLE}"
        ) from error
    except _TRANSIENT as error:
        raise TransientStorageError(f"{where}: {error}") from error
    except auth_exceptions.GoogleAuthError as error:
        if error.retryable:
            raise TransientStorageError(f"{where}: no valid credentials: {error}") from error
        raise NoAccessError(f"{where}: no valid credentials: {str(error).rstrip('.')}. {_LOG_IN}") from error
    except api_exceptions.GoogleAPIError as error:
        raise StorageError(f"{where}: {error}") from error


def _reason(error: api_exceptions.GoogleAPICallError) -> str:
    """Return the service's own words, without the request's URL."""
    answer: Any = error.response
    try:
        return str(answer.json()["error"]["message"]).rstrip(".")
    except (AttributeError, KeyError, TypeError, ValueError):
        # A proxy's answer, or that of an upload: no document of the service's.
        return str(error.message).rstrip(".")
