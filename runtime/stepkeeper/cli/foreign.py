"""Show the checkpoints that another writer left in a root."""

from stepkeeper.cli.render import Row
from stepkeeper.cli.root import Root
from stepkeeper.log import LogState
from stepkeeper.log.foreign_steps import ForeignStep, find_steps, find_steps_below

__all__ = ["legacy_rows"]


def legacy_rows(root: Root, state: LogState) -> list[Row]:
    """Build the rows of the foreign steps that the latest line continues from, newest first."""
    return [
        _row(each) for each in find_steps_below(state, lambda: find_steps(root.store, patience=root.patience))
    ]


def _row(legacy: ForeignStep) -> Row:
    return Row(
        sequence=None,
        step=legacy.step,
        claim=None,
        state="legacy" if legacy.is_finished else "incomplete",
        size_bytes=legacy.size_bytes,
        verified=False,
        folder=legacy.folder,
    )
