"""Each of torch_xla's own tests of its checkpoints is driven here, or stands in the documentation with its reason.

The names are those of test/spmd/test_xla_distributed_checkpoint.py in torch_xla's repository, as of its release 2.9.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "user" / "planners.md"
DROPIN = Path("torch_xla_dropin")

DRIVEN: dict[str, tuple[str, str]] = {
    "EndToEndCheckpointTest.test_resharding_unsharded_to_sharded": ("moving.py", "moved"),
    "EndToEndCheckpointTest.test_resharding_sharded_to_unsharded": ("moving.py", "moved"),
    "EndToEndCheckpointTest.test_resharding_different_device_mesh": ("moving.py", "moved"),
    "EndToEndCheckpointTest.test_resharding_transpose_device_mesh": ("moving.py", "moved"),
    "EndToEndCheckpointTest.test_padded_tensor": ("moving.py", "padded_on"),
    "SPMDLoadPlannerTest.test_state_dict_separation": ("user.py", "saved_and_loaded"),
    "SPMDSavePlannerTest.test_state_dict_separation": ("user.py", "plan_by_hand"),
    "SPMDSavePlannerTest.test_local_save_plan": ("moving.py", "written"),
    "SPMDSavePlannerTest.test_resolve_shard_data": ("moving.py", "written"),
    "CheckpointManagerTest.test_manager_checkpointing": ("managing.py", "seen_of_saves"),
    "CheckpointManagerTest.test_manager_step_tracking": ("managing.py", "seen_of_saves"),
    "CheckpointManagerTest.test_manager_max_to_keep": ("managing.py", "seen_of_eviction"),
    "CheckpointManagerTest.test_manager_async_step_tracking": ("managing.py", "seen_of_saves"),
    "OptimizerCheckpointTest.test_sgd": ("managing.py", "seen_of_optimizers"),
    "OptimizerCheckpointTest.test_adamw": ("managing.py", "seen_of_optimizers"),
}
"""Each test that passes, and the function that does the same with both libraries, which have to see the same."""

EXPLAINED = {
    "EndToEndCheckpointTest.test_multihost_checkpoint",
    "SPMDLoadPlannerTest.test_local_load_plan",
    "SPMDLoadPlannerTest.test_resolve_and_commit_sharded_tensor",
    "SPMDSavePlannerTest.test_save_state_dict_with_cpu_shards",
    "SPMDSavePlannerTest.test_cpu_state_dict_flattening",
    "DistributedCheckpointHelpersTest.test_sharded_cpu_state_dict",
    "CheckpointManagerTest.test_manager_async",
    "CheckpointManagerTest.test_master_ip_discovery",
    "CheckpointManagerTest.test_preemption_sync_manager",
    "CheckpointManagerTest.test_auto_checkpoint",
}
"""Each test that doesn't pass, or isn't about what is replaced."""

PARTLY = {"test_resharding_sharded_to_unsharded", "test_local_save_plan"}
"""Tests that pass but for a part, which the page explains."""


def names_in_table() -> set[str]:
    """Return the tests that the page's table has, each with a reason."""
    rows = re.findall(r"^\| (.*`test_.*) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows
    assert all(len(reason) > 20 for _, reason in rows)
    return {name for tests, _ in rows for name in re.findall(r"`(test_\w+)`", tests)}


def test_the_page_explains_exactly_those_that_are_not_driven() -> None:
    explained = {name.partition(".")[2] for name in EXPLAINED}
    assert DRIVEN.keys().isdisjoint(EXPLAINED)
    assert names_in_table() == explained | PARTLY
    assert {name.partition(".")[2] for name in DRIVEN} >= PARTLY


@pytest.mark.parametrize("name", DRIVEN)
def test_what_drives_it_is_there_and_is_run(name: str) -> None:
    script, function = DRIVEN[name]
    tree = ast.parse((Path(__file__).parent / DROPIN / script).read_text(encoding="utf-8"))
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert function in functions
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert function in called
    runs = [
        path
        for path in Path(__file__).parent.glob("test_torch_xla_*.py")
        if path != Path(__file__) and f'"{script}"' in path.read_text(encoding="utf-8")
    ]
    assert runs, "a test runs the script with both libraries"
