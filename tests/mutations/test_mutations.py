"""Each patch here takes one mechanism away; the test that is named for it goes red then."""

import os
import re
import shutil
from pathlib import Path
from typing import Final

import pytest
from fork_server import ForkServer
from patching import MUTATED, PATCHES, REPOSITORY, THOROUGH, apply_patch

_RULES: Final = "tests/unit/runtime/test_log_rules.py"
_BACK: Final = "tests/unit/runtime/test_log_going_back.py"
_BRANCHES: Final = "tests/unit/runtime/test_log_branches.py"
_READING: Final = "tests/unit/runtime/test_log_reading.py"
_REPAIR: Final = "tests/unit/runtime/test_repair.py"
_REPAIR_BESIDE: Final = "tests/unit/runtime/test_repair_beside_others.py"
_REPAIR_DOUBTS: Final = "tests/unit/runtime/test_repair_doubts.py"
_CHAINS: Final = "tests/unit/runtime/test_log_chains.py"
_OPENING: Final = "tests/unit/runtime/test_log_opening.py"
_GARBAGE: Final = "tests/unit/runtime/test_garbage.py"
_LEASES: Final = "tests/unit/runtime/test_pin_leases.py"
_ROOT_CHECK: Final = "tests/unit/runtime/test_root_check.py"
_GCS: Final = "tests/contract/test_store_gcs_requests.py"
_BYTES: Final = "tests/property/test_storage_bytes.py"
_CUT: Final = "tests/property/test_storage_power_cut.py::test_nothing_that_was_answered_is_lost"
_KILL: Final = "tests/property/test_storage_kill.py::test_killed_at_any_storage_operation"
_LAUNCH: Final = "tests/integration/test_launch.py"
_ORPHANS: Final = (
    "test_what_a_command_leaves_behind_is_awaited_until_the_kill_that_the_first_signal_announces"
)
_LEGACY: Final = "tests/integration/test_manager_legacy.py"
_TIER: Final = "tests/unit/runtime/test_local_tier.py"
_RECURRING: Final = (
    "tests/unit/runtime/test_layout_cache.py::"
    "test_what_an_earlier_save_has_left_changes_nothing_that_is_stored"
)
_DCP: Final = "tests/integration/test_dcp_storage.py"
_FORKS: Final = "tests/integration/test_companion_forks.py"
_FORK_GUARD: Final = "tests/unit/runtime_process/test_fork_guard.py"
_WAITS: Final = "tests/unit/runtime_process/test_waits.py"
_PROCESSES: Final = (
    "tests/unit/runtime_process/test_companion_processes.py::"
    "test_a_companion_closes_what_it_has_inherited_and_nothing_that_its_interpreter_opened"
)
_PREEMPTION: Final = "tests/unit/runtime_process/test_preemption.py"
_STACKS: Final = "tests/unit/runtime_process/test_stacks.py"
_TOLD: Final = "tests/integration/test_manager_told.py::test_what_a_trainer_that_is_told_leaves_behind"
_PEERS: Final = "tests/unit/runtime_process/test_peer_links.py"

TESTS: Final = {
    "fence": f"{_RULES}::test_a_later_begin_fences_the_earlier_claim",
    "recompute": f"{_RULES}::test_a_later_begin_fences_the_earlier_claim",
    "void": f"{_RULES}::test_a_save_given_up_is_void_and_its_late_put_finds_the_slot_taken",
    "own-nonce": f"{_RULES}::test_a_put_without_an_answer_is_put_again",
    "put-again": f"{_RULES}::test_a_put_without_an_answer_is_put_again",
    "settle-first": f"{_RULES}::test_nothing_else_is_appended_before_an_unknown_outcome_is_settled",
    "resumed-claim": f"{_RULES}::test_the_latest_of_a_stale_claim_is_not_told",
    "claim-of-this-root": f"{_RULES}::test_a_claim_of_another_root_is_refused",
    "older-start": f"{_RULES}::test_an_older_start_of_the_same_job_is_fenced",
    "followed-claim-holds": f"{_BACK}::test_a_stale_claim_is_not_followed_and_stays_stale_on_head",
    "begin-of-that-nonce": f"{_BACK}::test_asked_again_for_the_same_begin_it_is_put_once",
    "forgetful-branches": "tests/property/test_storage_model.py::"
    "test_no_schedule_breaks_an_invariant[a-process-that-restored-nothing]",
    "branch-is-apart": f"{_BRANCHES}::test_head_stays_until_the_branch_has_a_commit",
    "branch-deletes-nothing-yet": f"{_BRANCHES}::test_nothing_is_deleted_before_the_branch_has_a_commit",
    "branch-falls-back": "tests/unit/runtime/test_log_left_behind.py::"
    "test_the_next_start_goes_on_from_what_was_head_before_the_branch",
    "chosen-is-chosen": "tests/unit/runtime/test_log_left_behind.py::"
    "test_what_somebody_has_chosen_to_leave_is_not_gone_on_from",
    "goes-back": "tests/integration/test_manager_restoring.py::"
    "test_what_is_saved_after_going_back_descends_from_what_was_restored",
    "entry-checksum": f"{_BYTES}::test_a_flipped_bit_in_any_byte_of_an_entry_is_seen_when_the_log_is_opened",
    "entry-read-again": f"{_READING}::"
    "test_bytes_that_go_bad_on_the_way_are_read_again_over_fresh_connections[1-empty]",
    "entry-read-afresh": f"{_READING}::"
    "test_bytes_that_go_bad_on_the_way_are_read_again_over_fresh_connections[1-empty]",
    "repair-stands-for-all": f"{_REPAIR}::test_the_newest_commit_is_not_proven_and_kept_apart[empty]",
    "repair-is-planned-anew": "tests/property/test_storage_model.py::"
    "test_no_schedule_breaks_an_invariant[a-repair]",
    "repair-wins-its-slot": f"{_REPAIR_BESIDE}::test_a_writer_that_appended_meanwhile_is_not_fenced",
    "proof-is-one-save": f"{_REPAIR}::test_of_two_saves_for_one_slot_neither_is_proven_and_both_are_kept",
    "deleted-is-no-proof": f"{_REPAIR_DOUBTS}::test_a_save_is_not_taken_for_a_commit_whose_deletion_may_be_lost_too",
    "unproven-is-kept-apart": f"{_REPAIR}::test_the_newest_commit_is_not_proven_and_kept_apart[empty]",
    "unproven-is-not-live": "tests/property/test_repair_random.py::test_random_damage",
    "lost-slot-is-marked": f"{_REPAIR}::test_a_gap_below_the_newest_index_is_marked_and_nothing_is_in_doubt",
    "behind-the-repair": f"{_REPAIR_BESIDE}::test_a_reader_that_stood_before_the_damage_goes_on_behind_the_repair",
    "pin-in-a-lost-slot": f"{_REPAIR_BESIDE}::test_what_a_pin_in_a_damaged_slot_may_hold_is_not_collected",
    "intruder-is-lost": "tests/unit/runtime/test_repair_intruders.py::"
    "test_what_came_into_an_emptied_slot_is_told_from_its_own_entry[3-commits]",
    "job-may-be-saving": "tests/unit/cli/test_cli_repair.py::"
    "test_it_is_refused_while_a_job_may_be_saving[file]",
    "gap": f"{_OPENING}::test_a_gap_before_the_tail_or_at_the_start_is_refused_page_by_page[40]",
    "base-of-that-nonce": f"{_CHAINS}::test_another_entry_in_the_place_of_an_index_is_not_taken_for_it",
    "base-said-once-more": "tests/property/test_log_indexes.py::"
    "test_any_bad_entry_below_the_newest_index_costs_nothing",
    "needed-index-is-kept": f"{_CHAINS}::test_a_repair_keeps_what_old_indexes_tell",
    "nothing-for-a-repair": f"{_CHAINS}::test_nothing_stands_in_for_a_repair",
    "pin-then-refresh": "tests/unit/runtime/test_pins.py::"
    "test_a_commit_that_is_deleted_before_the_pin_is_there_is_not_held",
    "lease-over-starts": f"{_LEASES}::test_a_lease_goes_on_over_starts_and_ends_whoever_looks",
    "part-is-no-restore": "tests/integration/test_manager_branches.py::"
    "test_who_has_restored_a_part_goes_on_with_greater_steps_only",
    "other-state-is-no-restore": "tests/integration/test_manager_branches.py::"
    "test_who_saves_something_else_than_was_restored_deletes_nothing",
    "fence-is-said": "tests/integration/test_manager_fenced_unblocked.py::"
    "test_a_pod_ends_as_fenced_and_names_who_won[restore_latest]",
    "fence-ends-a-process": "tests/integration/test_manager_fenced_unblocked.py::"
    "test_a_process_by_hand_that_an_exception_ends_ends_as_fenced[save]",
    "lease-ends": f"{_LEASES}::test_who_never_renews_holds_its_data_for_a_lease_and_no_longer",
    "lease-since-the-renewal": f"{_LEASES}::test_who_is_slow_and_renews_keeps_its_data",
    "lease-from-the-second": f"{_LEASES}::test_a_lease_runs_by_commits_and_by_the_stores_times_of_them",
    "lease-by-the-stores-time": "tests/unit/runtime_process/test_companion_session.py::"
    "test_a_pin_that_nobody_renews_is_removed_after_a_lease",
    "renewed-is-spared": f"{_LEASES}::test_who_renews_while_its_pin_is_removed_keeps_its_data",
    "lost-pin-is-told": f"{_LEASES}::test_who_renews_after_its_pin_was_removed_is_told",
    "pins-hold": f"{_GARBAGE}::test_what_is_pinned_keeps_its_data_until_its_last_pin_is_gone",
    "garbage-is-older": f"{_GARBAGE}::test_anybody_can_collect_beside_a_process_that_saves",
    "garbage-is-unnamed": f"{_GARBAGE}::test_garbage_of_earlier_claims_goes_and_nothing_else",
    "entry-before-deletion": f"{_KILL}[deleting-1]",
    "verified-is-kept": "tests/unit/runtime/test_retention.py::test_the_newest_verified_one_is_kept_however_old",
    "verified-first": "tests/unit/runtime/test_retention.py::test_without_a_verified_one_nothing_goes",
    "abandoned-is-kept": "tests/unit/runtime/test_retention.py::"
    "test_an_abandoned_branch_goes_once_the_line_has_passed_it_verified",
    "verify-after-commit": "tests/unit/runtime/test_checkpoint_objects.py::test_damage_is_seen_right_after_the_save",
    "condemned-is-no-scratch": f"{_RULES}::"
    "test_a_root_whose_commits_were_all_condemned_is_begun_anew_only_when_told",
    "foreign-root": f"{_RULES}::test_another_jobs_root_needs_a_take_over",
    "probe-is-exclusive": f"{_ROOT_CHECK}::test_a_name_that_can_be_taken_twice_is_refused",
    "probe-by-the-last": f"{_ROOT_CHECK}::test_a_name_that_another_host_can_take_too_is_refused",
    "probe-is-shared": f"{_ROOT_CHECK}::test_two_hosts_with_disks_of_their_own_are_refused_at_once_and_named",
    "place-first": "tests/unit/runtime_process/test_save_persist.py::"
    "test_no_rank_waits_for_one_whose_companion_does_not_start",
    "moved-before-written": "tests/unit/runtime_process/test_save_transfers.py::"
    "test_a_region_is_not_used_again_before_all_is_in_it",
    "companion-is-watched": f"{_FORKS}::"
    "test_a_companion_that_dies_is_missed_at_once_whoever_holds_its_socket[unhooked]",
    "trainer-is-watched": "tests/integration/test_companion_process.py::"
    "test_a_companion_is_gone_with_its_trainer_though_a_forked_child_has_its_socket",
    "forks-are-held-back": f"{_FORK_GUARD}::"
    "test_no_thread_forks_between_the_making_of_a_descriptor_and_its_being_known",
    "inherited-is-closed": _PROCESSES,
    "own-files-stay-open": _PROCESSES,
    "no-call-after-the-end": "tests/unit/runtime_process/test_store_calls.py::"
    "test_no_thread_of_the_background_begins_a_call_after_the_end",
    "forked-copies-are-closed": f"{_FORK_GUARD}::"
    "test_what_has_descriptors_lets_go_of_them_in_a_child_and_only_there",
    "start-is-given-up": "tests/unit/runtime_process/test_companion_client.py::"
    "test_a_manager_closes_in_time_though_a_companion_never_starts",
    "notice-ends-waits": f"{_WAITS}::test_a_wait_ends_with_the_notices_time_and_says_so",
    "forked-waits-end": f"{_WAITS}::test_a_forked_child_waits_for_nothing_of_its_parents",
    "end-keeps-its-code": "tests/unit/runtime_process/test_kept_exit_code.py::"
    "test_a_process_that_ends_for_another_reason_says_so_also_where_it_is_told_only_then[True-False-0-78]",
    "taken-back-from-c": f"{_PREEMPTION}::"
    "test_sigterm_is_taken_back_from_code_in_c_that_would_end_the_process",
    "taken-back-while-handled": f"{_PREEMPTION}::test_a_handler_that_is_uninstalled_meanwhile_takes_nothing_back",
    "parents-end-is-a-notice": "tests/integration/test_launch_spawned.py::"
    "test_processes_whose_parent_dies_of_sigterm_save_one_step[fork-starter1]",
    "killed-has-a-word": f"{_LAUNCH}::test_a_crash_is_the_pods_own_and_its_rank_and_signal_are_told",
    "own-word-stays": "tests/unit/runtime_process/test_killed.py::"
    "test_of_several_words_that_counts_which_tells_most[the rank has said why itself]",
    "ends-without-python": "tests/unit/runtime_process/test_exit_timer.py::"
    "test_the_process_ends_with_the_code_unless_it_is_cancelled[the interpreter is taken down]",
    "first-signal-counts": f"{_LAUNCH}::{_ORPHANS}",
    "wait-from-the-signal": f"{_LAUNCH}::{_ORPHANS}",
    "chosen-end-is-saved": f"{_TOLD}[left_between-75-2]",
    "within-a-step-is-no-step": f"{_TOLD}[left_within-75-1]",
    "stacks-after-a-failed-dump": f"{_STACKS}::test_a_dump_that_fails_is_not_the_last",
    "stacks-are-spread-once": f"{_STACKS}::test_another_rank_answers_rank_0_and_asks_nobody",
    "deaf-in-the-store": "tests/unit/runtime_process/test_store_callers.py::"
    "test_a_rank_whose_store_stands_still_waits_only_as_long_as_it_may[notice-NoticeDeadlineError]",
    "stop-without-a-round": "tests/unit/runtime_process/test_step_agreement.py::"
    "test_a_rank_trains_on_past_its_wish_to_stop_until_the_notices_time_is_over",
    "restore-is-deaf": "tests/unit/runtime_process/test_restore_filling.py::"
    "test_a_store_that_is_stuck_is_left_with_the_notice_and_changes_nothing_later",
    "silence-ends-a-restore": "tests/unit/runtime_process/test_standing_still.py::"
    "test_a_restore_that_gets_nothing_ends[False-StorageError]",
    "silence-ends-a-share": "tests/unit/runtime_process/test_time_limits.py::"
    "test_only_silence_ends_the_wait_for_an_answer[0-200-100]",
    "stillness-is-missed": "tests/unit/runtime_process/test_signs_of_life.py::"
    "test_a_rank_that_stands_still_in_a_save_is_missed_soon",
    "end-of-a-rank-is-seen": f"{_PEERS}::test_a_forked_worker_does_not_hide_that_its_trainer_was_killed",
    "leaving-is-announced": f"{_PEERS}::test_who_leaves_for_an_error_tells_it_to_those_that_wait[error0-PeerLostError]",
    "progress-is-for-all": f"{_PEERS}::test_the_time_for_all_ranks_together_starts_anew_with_progress_too",
    "told-structure": "tests/unit/runtime_process/test_companion_structures.py::"
    "test_another_structure_has_another_key_and_only_the_last_is_held",
    "told-is-proven": "tests/unit/runtime_process/test_companion_structures.py::"
    "test_nothing_is_written_by_a_key_that_what_was_told_does_not_have",
    "recurring-values": _RECURRING,
    "recurring-ranks": _RECURRING,
    "fence-is-not-masked": "tests/unit/runtime_process/test_save_persist.py::"
    "test_what_fails_because_of_a_newer_claim_is_said_to_be_fenced_on_all_ranks",
    "vote": "tests/unit/runtime_process/test_save_persist.py::test_what_one_rank_could_not_write_is_void",
    "whole": "tests/unit/runtime/test_checkpoint_objects.py::test_ranks_that_do_not_fit_together_are_no_checkpoint",
    "block-checksum": f"{_BYTES}::test_a_flipped_bit_anywhere_in_an_object_is_seen[__0_0.distcp]",
    "manifest-checksum": f"{_BYTES}::test_a_flipped_bit_anywhere_in_an_object_is_seen[manifest.0.json]",
    "bad-copy-counts-for-nothing": f"{_TIER}::test_only_what_is_bad_at_the_root_is_torn",
    "staged-is-compared": f"{_TIER}::test_a_disk_that_holds_something_else_by_then_uploads_nothing_of_it",
    "copies-prove-nothing": "tests/integration/test_manager_tier.py::test_a_restore_reads_none_of_the_roots_data",
    "legacy-is-chosen": f"{_LEGACY}::test_an_old_root_is_resumed_and_left_as_it_is",
    "legacy-below": "tests/unit/runtime/test_log_foreign_steps.py::"
    "test_when_the_first_commit_is_condemned_what_lies_below_it_is_the_latest_again",
    "second-reading": "tests/unit/runtime_process/test_second_read.py::"
    "test_one_node_alone_reads_again_over_fresh_connections",
    "one-condemnation": f"{_LEGACY}::test_two_bad_ones_in_one_start_are_no_bad_checkpoints",
    "link": "tests/contract/test_store_posix.py::test_of_64_threads_in_8_processes_one_wins_each_slot",
    "rename-replaces-nothing": "tests/unit/runtime/test_storage_posix.py::"
    "test_without_links_a_name_is_taken_by_a_rename_that_replaces_nothing",
    "gcs-generation": f"{_GCS}::test_an_entry_of_the_log_is_one_request_with_a_condition_and_a_checksum",
    "gcs-bulk-generation": f"{_GCS}::test_bulk_data_is_sent_with_a_condition_and_a_checksum_of_the_whole",
    "fsync-of-a-puts-folders": f"{_CUT}[saving]",
    "fsync-of-a-writes-folders": f"{_CUT}[saving]",
    "fsync-of-files": f"{_CUT}[saving]",
    "fsync-of-what-was-there": f"{_CUT}[meeting_an_object]",
    "fsync-of-folders": f"{_CUT}[saving]",
    "fsync-of-the-roots-parent": f"{_CUT}[meeting_folders]",
    "fsync-above": f"{_CUT}[meeting_folders]",
    "fsync-of-new-folders": "tests/property/test_storage_power_cut.py::"
    "test_a_folder_made_where_no_name_can_be_made_to_last_is_refused",
    "fsync-by-the-loser": f"{_CUT}[meeting_an_entry]",
    "dcp-old-stays": f"{_DCP}::test_killed_anywhere_what_can_be_read_is_whole",
    "dcp-all-there": f"{_DCP}::test_hosts_that_do_not_see_one_folder_make_no_checkpoint",
}
"""By patch, the test that must notice."""


def test_each_patch_has_its_test() -> None:
    assert {path.stem for path in PATCHES.glob("*.patch")} == set(TESTS)


def patched(name: str, folder: Path) -> Path:
    """A copy of the runtime without that mechanism."""
    runtime = folder / "runtime"
    shutil.copytree(REPOSITORY / "runtime", runtime, ignore=shutil.ignore_patterns("__pycache__"))
    apply_patch(PATCHES / f"{name}.patch", folder)
    return runtime


@pytest.mark.parametrize("name", TESTS)
def test_each_patch_applies(name: str) -> None:
    apply_patch(PATCHES / f"{name}.patch", REPOSITORY, "--check")


@pytest.mark.parametrize("name", TESTS)
def test_without_a_mechanism_its_test_goes_red(torch_server: ForkServer, tmp_path: Path, name: str) -> None:
    runtime = patched(name, tmp_path)
    command = [MUTATED, runtime, "stepkeeper", "-q", "-x", "-p", "no:cacheprovider", THOROUGH, TESTS[name]]
    # The patched runtime is that of companions, too.
    env = os.environ | {"PYTHONPATH": str(runtime), "PYTHONDONTWRITEBYTECODE": "1"}
    done = torch_server.run(command, env=env, cwd=REPOSITORY, timeout=250)
    said = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, said
    assert re.search(r"\b1 failed", said), said
