"""Test a registry's metrics of a manager's saves: while they are exported, and after."""

from typing import cast

from prometheus_client import CollectorRegistry

from stepkeeper import CheckpointManager
from stepkeeper.prometheus import export
from stepkeeper.save.hooks import SaveHooks
from stepkeeper.save.report import SaveClock, SaveReport, SaveState

PARTS = ("transfer", "queue", "persist", "commit", "duration")


def manager_with(save_hooks: SaveHooks) -> CheckpointManager:
    """Make a manager, as far as metrics go: hooks are all that they use of it."""
    return cast(CheckpointManager, save_hooks)


def report(step: int, error: Exception | None = None) -> SaveReport:
    clock = SaveClock()
    clock.mark_released()
    clock.mark_state(SaveState.WRITING)
    if error is not None:
        return clock.build_report(step, size_bytes=50, error=error)
    clock.mark_state(SaveState.COMMITTING)
    return clock.build_report(step, size_bytes=100, sequence=step, total_bytes=120)


def tell(save_hooks: SaveHooks, *reports: SaveReport) -> None:
    for each in reports:
        save_hooks.report_save(each)
    assert save_hooks.await_hooks(60)


def test_a_save_that_failed_is_counted_as_that_and_its_stall_only() -> None:
    save_hooks, registry = SaveHooks(), CollectorRegistry()
    export(manager_with(save_hooks), registry)
    tell(save_hooks, report(1), report(2, OSError("no room")), report(3), report(4, OSError("no room")))
    value = registry.get_sample_value
    assert value("stepkeeper_saves_total", {"outcome": "committed"}) == 2
    assert value("stepkeeper_saves_total", {"outcome": "failed"}) == 2
    assert value("stepkeeper_saved_bytes_total") == 200
    assert value("stepkeeper_committed_step") == 3
    assert value("stepkeeper_save_stall_seconds_count") == 4
    assert [value(f"stepkeeper_save_{part}_seconds_count") for part in PARTS] == [2] * len(PARTS)
