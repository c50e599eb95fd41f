"""Read checkpoint folders with torch's own readers, without running code from `.metadata`.

Use them with `dcp.load`.
"""

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from typing_extensions import override

from stepkeeper_planners.pickles.dcp_metadata import check_metadata, read_metadata

if TYPE_CHECKING:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
else:
    try:
        from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader
    except ModuleNotFoundError:
        # This is its only home up to torch 2.14, and deprecated then.
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

__all__ = ["SafeFileSystemReader", "SafeFsspecReader", "SafeMetadata"]


class SafeMetadata(FileSystemReader):
    """Mixin for readers with FileSystemReader's file layout: it reads `.metadata` without running code."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read and check the checkpoint's metadata. No code from the file is run.

        Raises:
            MetadataDecodeError: the file is damaged, contradicts itself, or would run code.
        """
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as stream:
            metadata = read_metadata(stream.read(), name=str(path))
        check_metadata(metadata, name=str(path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafeFileSystemReader(SafeMetadata):
    """Read a checkpoint folder from an untrusted source: torch's FileSystemReader, but `.metadata` can't run code.

    Args: those of FileSystemReader.

    Ranks: all ranks make one, as with FileSystemReader.
    """


class SafeFsspecReader(SafeMetadata, FsspecReader):
    """Read a checkpoint from an untrusted source through fsspec; see SafeFileSystemReader."""
