"""Each patch in policy/ takes one rule of the operator's policy away; the test that is named for it goes red then."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from patching import MUTATED, PATCHES, REPOSITORY, apply_patch

POLICY: Final = PATCHES / "policy"
RULES: Final = REPOSITORY / "operator/stepkeeper_operator/policy"
VALUES: Final = {"__init__.py", "history.py", "finding.py"}
"""Modules that decide nothing."""

_UNIT: Final = "tests/unit/operator/test_operator_"
_JOBS: Final = "tests/unit/queued_resources/test_job_"

TESTS: Final = {
    "unknown-fields-are-refused": f"{_UNIT}obstacles.py::"
    "test_a_field_that_is_not_known_is_named_and_nothing_is_started",
    "templates-are-checked": f"{_UNIT}obstacles.py::"
    "test_a_label_that_job_and_jobset_give_is_refused[batch.kubernetes.io/job-name]",
    "names-of-others-are-left": f"{_UNIT}lifecycle.py::"
    "test_a_jobset_of_somebody_else_is_waited_for_and_never_adopted",
    "replaced-pods-are-left-out": f"{_UNIT}liveness.py::"
    "test_a_job_that_jobset_made_anew_by_itself_is_an_attempt_whose_reports_and_failures_are_its_own[1]",
    "what-a-shell-hides-is-not-done": f"{_UNIT}lifecycle.py::"
    "test_a_training_that_says_another_code_than_its_shell_is_not_done[True-1-ApplicationError]",
    "numbers-are-found-again": f"{_UNIT}lifecycle.py::"
    "test_a_job_whose_status_was_lost_goes_on_with_the_jobset_that_runs[True]",
    "who-lives-has-replaced": f"{_UNIT}liveness.py::"
    "test_a_pod_that_lives_has_replaced_one_that_ended_whatever_the_clocks_say[3]",
    "clocks-tell-of-no-other-start": f"{_UNIT}liveness.py::"
    "test_commits_and_steps_are_shown_though_the_clock_has_gone_back[3600]",
    "remade-jobs-are-attempts": f"{_UNIT}liveness.py::"
    "test_a_job_that_jobset_made_anew_by_itself_is_an_attempt_whose_reports_and_failures_are_its_own[1]",
    "replaced-jobs-fail-no-more": f"{_UNIT}liveness.py::"
    "test_a_failed_job_that_somebody_deletes_before_jobset_acts_on_it_is_made_anew_with_an_attempt",
    "suspended-once-all-have-ended": f"{_UNIT}liveness.py::"
    "test_a_job_is_suspending_until_its_last_pod_has_ended_and_what_it_saves_meanwhile_is_shown",
    "a-restart-is-counted": f"{_UNIT}restarts.py::test_a_spot_preemption_restarts_in_place_and_costs_no_failure",
    "starts-are-counted": f"{_UNIT}starts.py::"
    "test_ten_starts_without_a_commit_suspend_the_job_whatever_ends_them[75 without a word]",
    "what-never-ran-is-taken-back": f"{_JOBS}attempts.py::"
    "test_a_restart_that_has_made_no_pod_when_the_machines_go_is_no_attempt[True]",
    "failures-are-limited": f"{_UNIT}restarts.py::"
    "test_failures_restart_in_place_twice_then_in_a_new_jobset_after_a_back_off_then_end_the_job",
    "disruptions-are-limited": f"{_UNIT}restarts.py::test_disruptions_are_bounded_where_the_user_says_so",
    "commits-refill": f"{_UNIT}restarts.py::test_a_new_commit_refills_the_failure_budget",
    "back-off-doubles": f"{_UNIT}restarts.py::"
    "test_failures_restart_in_place_twice_then_in_a_new_jobset_after_a_back_off_then_end_the_job",
    "corrected-costs-move": f"{_UNIT}restarts.py::"
    "test_evidence_that_comes_after_the_restart_moves_its_cost_to_the_right_cause",
    "fenced-is-final": f"{_UNIT}causes.py::test_77_is_fenced_by_code_or_by_message_and_says_who",
    "hangs-are-told": f"{_UNIT}causes.py::test_the_cause_of[a hang that ends in an eviction]",
    "disruptions-come-first": f"{_UNIT}causes.py::test_the_cause_of[a spot machine is taken back]",
    "lost-nodes-are-told": f"{_UNIT}causes.py::test_the_cause_of[the survivor of a lost node fails first]",
    "restarted-nodes-are-told": f"{_UNIT}causes.py::"
    "test_the_cause_of[a node that restarts, and the survivor that fails first]",
    "own-limits-are-failures": f"{_UNIT}starts.py::test_who_uses_more_than_its_limits_fails_by_itself",
    "stopped-siblings-hide-nothing": f"{_UNIT}charges.py::"
    "test_a_failure_is_not_hidden_by_siblings_that_save_when_their_job_stops_them[1-ApplicationError]",
    "maintenance-explains": f"{_JOBS}machines.py::"
    "test_a_training_that_ends_by_itself_when_its_maintenance_begins_has_ended_for_it[-10-sigterm-Maintenance]",
    "saved-is-requested": f"{_UNIT}causes.py::test_the_cause_of[saved after a notice]",
    "failures-are-told": f"{_UNIT}causes.py::test_the_cause_of[an exit code of the application]",
    "lost-peers-are-a-guess": f"{_UNIT}causes.py::test_the_cause_of[only lost peers]",
    "deleted-is-requested": f"{_UNIT}causes.py::test_the_cause_of[somebody deleted a pod]",
    "jobs-without-pods-tell": f"{_UNIT}causes.py::test_a_job_that_is_left_says_what_its_pods_did[77-Verdict.FENCED]",
    "fatal-is-final": f"{_UNIT}causes.py::test_a_fatal_code_is_fatal_and_a_disruption_before_it_is_not",
    "spot-is-told-from-maintenance": f"{_UNIT}causes.py::test_the_cause_of[a spot machine is taken back]",
    "a-commit-explains": f"{_UNIT}restarts.py::test_a_lost_peer_alone_is_a_lost_node_if_the_attempt_had_committed",
    "a-reported-notice-explains": f"{_UNIT}charges.py::"
    "test_a_notice_that_was_reported_explains_an_end_without_last_words",
    "cloud-spot-is-spot": f"{_JOBS}attempts.py::test_machines_that_are_back_before_anything_was_stopped",
    "a-cause-settles": f"{_UNIT}charges.py::"
    "test_a_taint_on_the_node_of_a_dead_pod_changes_no_cause_and_skips_no_back_off[True]",
    "a-cause-is-corrected": f"{_UNIT}restarts.py::"
    "test_a_failure_is_found_to_be_a_lost_node_when_the_node_is_seen_to_be_lost",
    "own-pods-are-evidence": f"{_UNIT}liveness.py::"
    "test_the_other_slice_of_a_deleted_job_is_of_the_new_attempt_until_it_ends[1]",
    "held-restarts-are-no-starts": f"{_UNIT}liveness.py::"
    "test_a_failure_just_before_a_suspension_is_one_restart_when_the_job_is_resumed[False]",
    "suspensions-end-nothing-by-failure": f"{_UNIT}liveness.py::"
    "test_a_suspension_costs_nothing_however_its_pods_end_and_whenever_jobset_says_so[True-1]",
    "counted-ends-are-believed": f"{_UNIT}restarts.py::"
    "test_a_failure_that_no_operator_saw_is_judged_by_jobsets_counts",
    "reports-of-before-are-left": f"{_UNIT}liveness.py::"
    "test_the_steps_of_an_attempt_before_a_suspension_are_not_the_next_ones",
    "progress-counts-anew": f"{_UNIT}starts.py::test_what_was_only_restored_is_no_commit",
    "a-notice-completes-nothing": f"{_UNIT}lifecycle.py::"
    "test_a_job_whose_pods_exited_0_after_a_notice_before_its_last_step_goes_on",
    "a-deadline-is-awaited": f"{_UNIT}lost_nodes.py::test_a_pod_is_not_lost_while[the grace is not over]",
    "outages-lose-no-pods": f"{_UNIT}lost_nodes.py::test_a_pod_is_not_lost_while[half of all nodes are silent]",
    "new-operators-watch-first": f"{_UNIT}lost_nodes.py::test_a_pod_is_not_lost_while[the operator has just started]",
    "signs-of-life-count": f"{_UNIT}lost_nodes.py::"
    "test_a_pod_is_not_lost_while[the pod has reported since the node fell silent]",
    "successors-are-no-sign-of-life": f"{_UNIT}lost_nodes.py::"
    "test_steps_of_the_pod_that_took_its_place_keep_no_lost_one",
    "signs-of-life-end": f"{_UNIT}lost_nodes.py::"
    "test_a_step_that_was_done_long_after_its_node_went_silent_and_long_ago_is_no_sign_of_life",
    "left-pods-are-given-up": f"{_UNIT}lost_nodes.py::"
    "test_a_pod_of_a_lost_node_whose_job_is_gone_holds_up_no_next_attempt",
    "orphans-are-deleted": f"{_UNIT}ownership.py::"
    "test_pods_that_outlived_their_job_are_deleted_when_nobody_else_has_done_so",
    "lost-machines-stop": f"{_JOBS}machines.py::test_pods_keep_their_grace_period_until_they_have_to_stop_anyway",
    "lost-machines-explain": f"{_JOBS}attempts.py::test_an_end_that_is_seen_together_with_the_loss[False]",
    "guesses-by-counts-are-corrected": f"{_UNIT}charges.py::"
    "test_restarts_that_were_guessed_are_charged_to_their_own_causes_when_the_watches_tell_of_them",
    "losses-correct-causes": f"{_JOBS}attempts.py::"
    "test_a_survivor_that_failed_before_the_loss_was_seen_costs_no_failure[False]",
    "late-losses-explain-nothing": f"{_JOBS}attempts.py::"
    "test_machines_that_go_long_after_an_end_explain_nothing_though_a_pod_of_it_still_stops",
    "losses-of-later-attempts-explain-nothing": f"{_JOBS}attempts.py::"
    "test_an_attempt_after_a_suspension_by_the_user_that_met_a_failure",
    "what-ends-without-machines-is-taken-back": f"{_JOBS}attempts.py::"
    "test_pods_that_fail_on_the_machines_that_are_left_when_the_loss_is_seen_are_no_attempt",
    "what-peers-say-hides-no-failure": f"{_UNIT}charges.py::"
    "test_a_failure_is_charged_though_another_pod_saves_first_because_its_peers_stop",
    "who-died-of-a-signal-was-told": f"{_UNIT}causes.py::"
    "test_the_cause_of[one rank died of the signal that the others heard of]",
    "numbers-are-reserved": f"{_UNIT}lifecycle.py::test_an_edited_template_gets_a_new_jobset_with_the_next_number",
    "numbers-of-unseen-jobsets-are-used": f"{_UNIT}lifecycle.py::"
    "test_a_jobset_that_came_and_went_between_two_looks_gives_its_number_to_no_other",
    "leftovers-are-awaited": f"{_UNIT}ownership.py::"
    "test_no_second_gang_is_made_while_a_jobs_or_pods_of_the_first_are_there",
    "edits-replace": f"{_UNIT}lifecycle.py::test_an_edited_template_gets_a_new_jobset_with_the_next_number",
    "back-off-is-kept": f"{_UNIT}load.py::test_a_job_in_back_off_without_a_jobset_lists_nothing_either",
    "guesses-are-provisional": f"{_JOBS}attempts.py::"
    "test_a_jobset_that_survivors_have_failed_does_not_end_the_job[False]",
    "judged-is-judged": f"{_UNIT}charges.py::test_a_lower_budget_ends_no_attempt_that_was_allowed_to_start",
    "fatal-ends-the-job": f"{_UNIT}restarts.py::test_a_fatal_exit_code_ends_the_job_at_once",
    "in-place-restarts-wait": f"{_UNIT}starts.py::"
    "test_starts_that_end_at_once_wait_ever_longer_and_the_pods_are_not_there_meanwhile",
    "uncounted-failures-wait": f"{_UNIT}charges.py::"
    "test_failures_that_jobset_does_not_count_wait_ever_longer[False]",
    "ends-of-jobs-end-attempts": f"{_UNIT}charges.py::"
    "test_a_start_that_jobset_began_after_the_last_one_allowed_ends_with_the_job",
    "deletion-excuses": f"{_UNIT}charges.py::"
    "test_a_trainer_that_exits_1_because_its_jobset_was_deleted_costs_no_failure",
    "deletion-excuses-no-earlier-end": f"{_UNIT}causes.py::"
    "test_the_cause_of[a liveness probe that failed, in a pod that was deleted later]",
    "out-of-memory-is-a-failure": f"{_UNIT}causes.py::test_the_cause_of[out of memory]",
    "each-window-is-asked-once": f"{_JOBS}maintenance.py::"
    "test_a_training_is_told_for_what_it_saves_and_how_much_time_is_left",
    "a-commit-answers": f"{_JOBS}maintenance.py::"
    "test_a_training_is_asked_once_to_save_before_maintenance_with_the_time_that_saves_take",
    "nothing-to-lose-is-not-asked": f"{_JOBS}maintenance.py::"
    "test_a_training_whose_latest_step_is_committed_is_not_asked",
    "starts-are-limited": f"{_UNIT}starts.py::"
    "test_ten_starts_without_a_commit_suspend_the_job_whatever_ends_them[75 without a word]",
    "new-operators-hear-first": f"{_UNIT}starts.py::"
    "test_a_job_that_committed_while_nobody_watched_runs_on_until_its_pods_have_reported",
    "refused-edits-mend-nothing": f"{_UNIT}starts.py::"
    "test_a_refused_edit_of_what_comes_to_nothing_neither_counts_anew_nor_ends_its_waits",
    "counts-never-go-back": f"{_UNIT}restarts.py::"
    "test_a_failure_is_charged_once_though_the_watch_of_jobsets_is_behind",
    "starts-are-spaced": f"{_UNIT}starts.py::"
    "test_starts_that_end_at_once_wait_ever_longer_and_the_pods_are_not_there_meanwhile",
    "an-edit-ends-waits": f"{_UNIT}starts.py::test_a_mended_image_does_not_wait_for_the_broken_ones_back_off",
    "queued-jobs-leave": f"{_UNIT}kueue.py::test_a_job_that_is_suspended_leaves_its_queue_and_kueue_undoes_nothing",
    "suspended-jobs-stop": f"{_UNIT}lifecycle.py::test_a_suspended_job_stops_and_resumes_as_a_new_attempt",
    "steps-are-awaited": f"{_UNIT}progressing.py::"
    "test_a_training_that_makes_no_step_for_half_an_hour_is_seen_until_its_next_step",
    "long-steps-are-known": f"{_UNIT}progressing.py::"
    "test_a_step_may_take_ten_times_as_long_as_the_longest_one_of_its_attempt",
    "finished-pods-are-awaited": f"{_UNIT}progressing.py::"
    "test_pods_that_go_on_for_an_hour_after_another_is_done_are_seen_and_left_alone[False]",
    "standstills-stand": f"{_UNIT}progressing.py::"
    "test_all_clocks_begin_with_the_operator_and_what_was_found_stands[True]",
    "silence-is-no-standstill": f"{_UNIT}progressing.py::test_silence_is_no_standstill",
    "commits-are-progress": f"{_UNIT}progressing.py::test_a_commit_is_progress_too",
    "all-steps-are-made": f"{_UNIT}progressing.py::"
    "test_nothing_is_expected_of_a_training_with[all steps are made]",
    "restores-are-no-steps": f"{_UNIT}progressing.py::"
    "test_nothing_is_expected_of_a_training_with[it restores again]",
    "clocks-begin-with-the-operator": f"{_UNIT}progressing.py::"
    "test_all_clocks_begin_with_the_operator_and_what_was_found_stands[False]",
    "pace-is-the-attempts": f"{_UNIT}progressing.py::"
    "test_a_new_attempt_begins_anew_and_its_first_step_may_take_long",
    "finished-pods-are-counted": f"{_UNIT}progressing.py::"
    "test_a_pod_that_was_told_to_stop_and_exited_0_is_one_that_the_others_wait_for[False]",
    "done-is-done": f"{_UNIT}phases.py::"
    "test_a_job_whose_pods_have_exited_0_is_complete_whatever_is_edited_meanwhile[edit0]",
    "finished-slices-hide-nothing": f"{_UNIT}liveness.py::"
    "test_a_slice_that_is_done_hides_no_job_that_jobset_made_anew",
    "resumed-jobs-are-attempts": f"{_UNIT}liveness.py::test_a_resumed_job_has_an_attempt_before_its_first_pod_is_seen",
    "failed-jobs-are-restarted-first": f"{_UNIT}liveness.py::"
    "test_a_suspension_that_is_over_before_jobset_acts_on_a_failure_begins_no_attempt_of_its_own",
    "what-is-kueues-is-not-suspended": f"{_UNIT}kueue.py::"
    "test_a_queued_job_without_restarts_left_is_deleted_and_kueue_undoes_nothing",
    "own-limits-are-no-loss": f"{_JOBS}failures.py::"
    "test_a_pod_over_its_memory_limit_that_is_seen_together_with_the_loss_is_a_failure",
    "unseen-ends-of-told-pods-are-not-complete": f"{_UNIT}phases.py::"
    "test_nobody_knows_how_far_pods_were_that_exited_0_unseen_after_they_were_told_to_stop[QueuePreemption-False]",
    "replaced-pods-complete-nothing": f"{_UNIT}phases.py::"
    "test_a_pod_that_was_told_to_stop_and_replaced_keeps_no_job_from_its_end",
    "saved-ends-are-not-counted": f"{_UNIT}charges.py::"
    "test_failures_that_jobset_does_not_count_wait_ever_longer[False]",
    "reports-of-before-a-suspension-are-left": f"{_UNIT}progressing.py::"
    "test_a_job_of_which_nothing_runs_is_neither_progressing_nor_stalled",
    "last-words-tell-the-step": f"{_UNIT}lifecycle.py::"
    "test_a_job_whose_pods_exited_0_after_a_notice_before_its_last_step_goes_on",
    "other-containers-are-the-applications": f"{_UNIT}causes.py::test_the_cause_of[an init container that fails]",
    "pods-that-never-ran-are-a-guess": f"{_UNIT}causes.py::test_the_cause_of[a pod that was never admitted]",
}
"""By patch, the test that must notice."""

ALWAYS: Final = ("failures-are-limited", "starts-are-limited", "remade-jobs-are-attempts")
"""These are tried in each run of the tests, the others with the long ones."""


def test_each_patch_has_its_test() -> None:
    assert {path.stem for path in POLICY.glob("*.patch")} == set(TESTS)


def test_each_module_of_the_policy_has_a_patch() -> None:
    patched = re.findall(
        r"^\+\+\+ b/(\S+)$", "".join(p.read_text() for p in POLICY.glob("*.patch")), re.MULTILINE
    )
    decides = {path for path in RULES.rglob("*.py") if path.name not in VALUES}
    assert {REPOSITORY / path for path in patched} >= decides


@pytest.mark.parametrize("name", TESTS)
def test_each_patch_applies(name: str) -> None:
    apply_patch(POLICY / f"{name}.patch", REPOSITORY, "--check")


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.long) for name in TESTS]
)
def test_without_a_rule_its_test_goes_red(tmp_path: Path, name: str) -> None:
    operator = tmp_path / "operator"
    shutil.copytree(REPOSITORY / "operator", operator, ignore=shutil.ignore_patterns("__pycache__"))
    apply_patch(POLICY / f"{name}.patch", tmp_path)
    command = [
        sys.executable,
        str(MUTATED),
        str(operator),
        "stepkeeper_operator",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        TESTS[name],
    ]
    env = os.environ | {"PYTHONPATH": str(operator), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=250, check=False
    )
    said = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, said
    assert re.search(r"\b1 failed", said), said
