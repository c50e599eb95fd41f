"""Save or load with this environment's torch: python across.py save|load FOLDER.

What one environment saved, another one loads.
"""

import runpy
import sys
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper import CheckpointManager, Options, SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper.dcp import StorageReader, StorageWriter

STATES = runpy.run_path(str(Path(__file__).parents[2] / "property" / "planners_parts" / "release_state.py"))


def save_all(folder: Path) -> None:
    """Save one state with a manager, with torch's save through our writer, and with nothing of ours."""
    with CheckpointManager(
        (folder / "manager").as_uri(), save=1, options=Options(stop_on_notice=False)
    ) as manager:
        manager.save(7, STATES["make_state"]()).result()
    save(
        STATES["make_state"](),
        storage_writer=StorageWriter(folder / "writer"),
        planner=SPMDSavePlanner(),
        no_dist=True,
    )
    save(STATES["make_state"](), checkpoint_id=str(folder / "stock"), no_dist=True)
    (folder / "torch").write_text(torch.__version__)


def load_all(folder: Path) -> None:
    """Load all that `save_all` saved: ours with stock torch and with ours, and stock's with ours."""
    newest = (folder / "torch").read_text()
    (step,) = (each.parent for each in (folder / "manager").rglob(".metadata"))
    for ours in (step, folder / "writer"):
        state = STATES["make_state"](100)
        load(state, storage_reader=FileSystemReader(ours), no_dist=True)
        STATES["check_same"](
            state, STATES["make_state"](), f"stock {torch.__version__} reads {ours.name} of {newest}"
        )
    for saved in (step, folder / "writer", folder / "stock"):
        state = STATES["make_state"](100)
        load(state, storage_reader=StorageReader(saved), planner=SPMDLoadPlanner(), no_dist=True)
        STATES["check_same"](
            state, STATES["make_state"](), f"ours on {torch.__version__} reads {saved.name} of {newest}"
        )
    state = STATES["make_state"](100)
    with CheckpointManager(
        (folder / "manager").as_uri(), save=1, options=Options(stop_on_notice=False)
    ) as manager:
        restored = manager.restore(state)
    assert restored is not None
    assert restored.step == 7
    STATES["check_same"](
        state, STATES["make_state"](), f"a manager on {torch.__version__} goes on from {newest}"
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"save": save_all, "load": load_all}[sys.argv[1]](Path(sys.argv[2]))
    # The test sees by it that the two are what they should be.
    sys.stdout.write(torch.__version__)
