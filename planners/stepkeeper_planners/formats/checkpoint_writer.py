"""Write a state, in memory or mapped from a file, as a checkpoint folder."""

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from stepkeeper_planners.errors import PlannerError
from stepkeeper_planners.formats.destination import new_folder
from stepkeeper_planners.formats.reporting import Conversion, Progress, ProgressMeter
from stepkeeper_planners.saving.planner import SPMDSavePlanner
from stepkeeper_planners.state.tree import flatten_state

__all__ = ["write_checkpoint"]


def write_checkpoint(
    state: Mapping[str, Any], dst: Path, *, source: Path, overwrite: bool, progress: Progress | None
) -> Conversion:
    """Write the state as the checkpoint folder `dst`. Each tensor is read when it is written.

    Args:
        state: the tensors and values, nested.
        dst: the folder to write.
        source: the file or folder that the state comes from.
        overwrite: whether an existing checkpoint at `dst` is replaced.
        progress: called with the bytes that are done and those of all tensors.

    Raises:
        PlannerError: this process is one of several in a process group.
        DestinationExistsError: there is something at `dst` that is not replaced.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise PlannerError(
            f"{dst}: a conversion runs in a single process, but this is one of {dist.get_world_size()}; convert in a "
            "separate process, or before init_process_group"
        )
    flat = flatten_state(state)
    total_bytes = sum(tensor.numel() * tensor.element_size() for tensor in flat.tensors.values())
    with new_folder(dst, source=source, overwrite=overwrite, replaceable=_is_of_checkpoint) as new:
        planner = _Planner(ProgressMeter(total_bytes=total_bytes, callback=progress))
        try:
            with warnings.catch_warnings():
                # torch warns if there is one process only, and about what its own code uses.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
                save({**state}, storage_writer=FileSystemWriter(new), planner=planner, no_dist=True)
        except CheckpointException as error:
            raise _reason(error.failures[0][0]) from error
        names = sorted(path.name for path in new.iterdir())
    return Conversion(
        files=tuple(dst / name for name in names),
        tensors=(*flat.tensors, *flat.aliases),
        tensor_bytes=total_bytes,
    )


def _is_of_checkpoint(path: Path) -> bool:
    """Return whether this is a file of a finished checkpoint."""
    return path.with_name(".metadata").is_file() and (path.name == ".metadata" or path.suffix == ".distcp")


def _reason(failure: BaseException) -> BaseException:
    """Return the error that a caller expects. For a failed write, torch only reports that its position is wrong."""
    # torch raises a RuntimeError of its own, with an OSError such as of a full disk somewhere among its causes.
    reason: BaseException | None = failure
    while type(failure) is RuntimeError and reason is not None:
        if isinstance(reason, OSError):
            return reason
        reason = reason.__cause__ or reason.__context__
    return failure


class _Planner(SPMDSavePlanner):
    """Report each tensor to the meter as it is written."""

    def __init__(self, meter: ProgressMeter) -> None:
        super().__init__()
        self._meter = meter

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the item's data, and count it."""
        data = super().resolve_data(write_item)
        if isinstance(data, torch.Tensor):
            self._meter.add(data.nbytes)
        return data
