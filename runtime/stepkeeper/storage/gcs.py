"""Use a prefix of a Cloud Storage bucket as a store.

Generation 0 is the put-if-absent; the server checks every crc32c.
"""

import base64
import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, final

import google.auth
import requests
from google.api_core import exceptions as api_exceptions
from google.api_core.retry import Retry
from google.auth import exceptions as auth_exceptions
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import AuthorizedSession
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption
from google.cloud.storage.retry import DEFAULT_RETRY
from requests.adapters import HTTPAdapter

from stepkeeper.errors import (
    MissingObjectError,
    NoAccessError,
    ObjectExistsError,
    StorageError,
    TransientStorageError,
)
from stepkeeper.storage.base import Buffer, ObjectStat, check_path, joined_size_bytes
from stepkeeper.storage.crc import crc32c, crc32c_of_parts
from stepkeeper.storage.gcs_upload import CALL_TIMEOUT_S, Place, upload
from stepkeeper.storage.retry import Patience

__all__ = ["GcsStore"]

_SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_write"
_CONNECTIONS: Final = 64
_STREAMS: Final = 16
_RETRY_S: Final = 30.0
"""The seconds of retries within one call; callers retry longer by themselves."""

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


@final
class GcsStore:
    """Store objects in a bucket of Cloud Storage.

    It uses STORAGE_EMULATOR_HOST, without credentials, if that is set; else the application default credentials.
    """

    def __init__(
        self, *, bucket: str, prefix: str, retry_s: float = _RETRY_S, streams: int = _STREAMS
    ) -> None:
        self._streams, self._retry_s = streams, retry_s
        self._uri = f"gs://{bucket}/{prefix}".rstrip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        with _converting_errors(self._uri, bucket):
            self._session = _session()
        # The client requires the name of a project, which is never used for a bucket.
        credentials = self._session.credentials
        self._client = storage.Client(project="unknown", credentials=credentials, _http=self._session)
        self._bucket = self._client.bucket(bucket)
        self._retry: Retry = DEFAULT_RETRY.with_delay(initial=0.2, maximum=8.0).with_timeout(retry_s)
        self._patience = Patience(total_s=retry_s)
        self._bucket_was_there = False
        """True once a listing has shown that the bucket exists."""

    @property
    def uri(self) -> str:
        return self._uri

    @property
    def streams(self) -> int:
        return self._streams

    def put_if_absent(self, path: str, data: bytes) -> bool:
        with self._converted_errors(path):
            try:
                self._create(path, data)
            except api_exceptions.PreconditionFailed:
                return False
        return True

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        with self._converted_errors(path):
            try:
                self._upload(path, parts)
            except api_exceptions.PreconditionFailed:
                # A retry of a request that had succeeded gets this answer too: compare the stored bytes.
                self._check_same(path, parts)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        end = None if length is None else offset + length - 1
        with self._converted_errors(path):
            try:
                data: bytes = self._blob(path).download_as_bytes(
                    # Without a start and an end, no range is requested.
                    start=(offset or None) if end is None else offset,
                    end=end,
                    raw_download=True,
                    checksum=None,
                    retry=self._retry,
                    timeout=CALL_TIMEOUT_S,
                )
            except api_exceptions.RequestRangeNotSatisfiable:
                return b""
            except api_exceptions.NotFound as error:
                if not self._bucket_was_there:
                    self._check_bucket()
                raise MissingObjectError(f"{self._uri}/{path} does not exist") from error
        return data

    def list(self, prefix: str) -> list[ObjectStat]:
        return sorted(self._listed(prefix), key=lambda stat: stat.path)

    def list_page(self, prefix: str, start: str, limit: int) -> Sequence[ObjectStat]:
        return tuple(self._listed(prefix, start_offset=self._prefix + start, max_results=limit))

    def _listed(self, prefix: str, **options: Any) -> Iterator[ObjectStat]:
        with self._converted_errors(prefix):
            blobs = self._client.list_blobs(
                self._bucket,
                prefix=self._prefix + prefix,
                fields="items(name,size,crc32c,timeCreated),nextPageToken",
                retry=self._retry,
                timeout=CALL_TIMEOUT_S,
                **options,
            )
            for blob in blobs:
                yield ObjectStat(
                    path=blob.name.removeprefix(self._prefix),
                    size_bytes=int(blob.size or 0),
                    crc32c=_decoded_crc32c(blob.crc32c),
                    time_unix_s=None if blob.time_created is None else blob.time_created.timestamp(),
                )
        self._bucket_was_there = True

    def delete(self, path: str) -> None:
        with self._converted_errors(path), contextlib.suppress(api_exceptions.NotFound):
            self._blob(path).delete(retry=self._retry, timeout=CALL_TIMEOUT_S)

    def bucket_settings(self) -> dict[str, Any]:
        """Read the bucket as in the JSON API. Raises StorageError without storage.buckets.get."""
        with self._converted_errors(""):
            self._bucket.reload(retry=self._retry, timeout=CALL_TIMEOUT_S)
            return dict(self._bucket._properties)  # noqa: SLF001  # the only access that has every field

    def reopen(self) -> "GcsStore":
        return GcsStore(
            bucket=self._bucket.name,
            prefix=self._prefix.rstrip("/"),
            retry_s=self._retry_s,
            streams=self._streams,
        )

    def close(self) -> None:
        self._client.close()

    @property
    def _account(self) -> str | None:
        """Name of the service account in use; None if unknown, as before the first token of a machine's account."""
        name = getattr(self._session.credentials, "service_account_email", None)
        return name if name and name != "default" else None

    def _blob(self, path: str) -> Any:
        return self._bucket.blob(self._prefix + check_path(path))

    def _create(self, path: str, data: bytes) -> None:
        """Create the object. Raises PreconditionFailed if there is one, perhaps by an earlier try."""
        blob = self._blob(path)
        # The checksum is sent with the request: the server refuses bytes that don't match it.
        blob.crc32c = _encoded_crc32c(crc32c(data))
        blob.upload_from_string(
            data,
            content_type="application/octet-stream",
            if_generation_match=0,
            checksum=None,
            retry=self._retry,
            timeout=CALL_TIMEOUT_S,
        )

    def _upload(self, path: str, parts: Sequence[Buffer]) -> None:
        place = Place(
            session=self._session,
            endpoint=str(self._client.api_endpoint),
            bucket=self._bucket.name,
            name=self._prefix + check_path(path),
        )
        crc = _encoded_crc32c(crc32c_of_parts(parts))
        upload(place, parts, crc, retry=self._retry, patience=self._patience)

    def _check_bucket(self) -> None:
        """Check that the bucket exists. Raises NotFound if it doesn't: a listing raises that for no other reason.

        The text of a 404 isn't used: it contains the names of bucket and object, which may look like anything.
        """
        blobs = self._client.list_blobs(
            self._bucket,
            prefix=self._prefix,
            max_results=1,
            fields="items(name)",
            retry=self._retry,
            timeout=CALL_TIMEOUT_S,
        )
        next(iter(blobs), None)
        self._bucket_was_there = True

    def _check_same(self, path: str, parts: Sequence[Buffer]) -> None:
        there = [stat for stat in self.list(path) if stat.path == path]
        if not there:
            raise TransientStorageError(
                f"{self._uri}/{path}: the server reported both that it exists and that it doesn't"
            )
        if (there[0].size_bytes, there[0].crc32c) != (joined_size_bytes(parts), crc32c_of_parts(parts)):
            raise ObjectExistsError(f"{self._uri}/{path} exists with other bytes; it was not overwritten")

    def _converted_errors(self, path: str) -> AbstractContextManager[None]:
        return _converting_errors(f"{self._uri}/{path}", self._bucket.name, self._account)


def _session() -> AuthorizedSession:
    credentials: Any
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        credentials = AnonymousCredentials()
    else:
        credentials, _ = google.auth.default(scopes=[_SCOPE])
    session = AuthorizedSession(credentials)
    for scheme in ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(pool_connections=4, pool_maxsize=_CONNECTIONS, pool_block=False))
    return session


def _encoded_crc32c(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def _decoded_crc32c(text: str | None) -> int | None:
    return None if text is None else int.from_bytes(base64.b64decode(text), "big")


@contextlib.contextmanager
def _converting_errors(where: str, bucket: str, account: str | None = None) -> Iterator[None]:
    """Convert the client's errors into StorageErrors that name the object `where`, and how to get access."""
    try:
        yield
    except StorageError:
        raise
    except api_exceptions.NotFound as error:
        raise NoAccessError(
            f"{where}: there is no bucket {bucket!r} ({_reason(error)}). Correct the URI, or create the bucket: "
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
    """Return the service's error text, without the request's URL."""
    answer: Any = error.response
    try:
        return str(answer.json()["error"]["message"]).rstrip(".")
    except (AttributeError, KeyError, TypeError, ValueError):
        # The answer of a proxy or an upload: it isn't the service's JSON.
        return str(error.message).rstrip(".")
