"""The cause that an exception tells: a store that gave no answer is no failure of the training."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import Cause, Interval, Settings, Termination
from stepkeeper.error_codec import decode_error, encode_error
from stepkeeper.errors import (
    CompanionLostError,
    SaveError,
    StepkeeperError,
    StorageAwayError,
    StorageError,
    TransientStorageError,
    UnknownOutcomeError,
)
from stepkeeper.process_end.known_causes import find_known_cause
from stepkeeper.save.persist import _join_refusals
from stepkeeper.training.environment import Environment, PodPaths
from stepkeeper.training.grace_period import GracePeriod
from stepkeeper.training.notices.watcher import NoticeWatcher
from stepkeeper.training.termination import ProcessExit
from stepkeeper_testing.pod import pod_identity


def raised_from(cause: Exception) -> Exception:
    error = SaveError("a save in the background failed")
    error.__cause__ = cause
    return error


AWAY = [TransientStorageError("503"), UnknownOutcomeError("slot 7"), StorageAwayError("step 7")]


@pytest.mark.parametrize("error", [*AWAY, raised_from(TransientStorageError("503")), raised_from(AWAY[2])])
def test_a_store_that_gave_no_answer_is_a_cause_of_its_own(error: Exception) -> None:
    assert find_known_cause(error) is Cause.STORAGE_UNAVAILABLE


@pytest.mark.parametrize(
    ("refusals", "kind"),
    [
        ((TransientStorageError("503"),), StorageAwayError),
        ((TransientStorageError("503"), CompanionLostError("gone")), StorageAwayError),
        ((TransientStorageError("503"), ValueError("a bug")), SaveError),
        ((StorageError("full"),), SaveError),
        ((CompanionLostError("gone"),), CompanionLostError),
    ],
)
def test_all_ranks_hear_that_the_store_was_away(
    refusals: tuple[Exception, ...], kind: type[StepkeeperError]
) -> None:
    joined = _join_refusals(7, dict(enumerate(refusals)))
    assert type(joined) is kind
    assert type(decode_error(encode_error(joined))) is kind


def last_word_of(tmp_path: Path, code: int, failure: Exception) -> Termination:
    places = PodPaths(settings_folder=tmp_path, termination_file=tmp_path / "termination")
    settings = Settings(uri="file:///root", interval=Interval(steps=1))
    ending = ProcessExit(
        Environment(identity=pod_identity(), settings=settings, places=places),
        cast(Companion, SimpleNamespace(claimed_root=None)),
        cast(Progress, SimpleNamespace(step=7)),
        notices := cast(NoticeWatcher, SimpleNamespace(notice=None, notices=())),
        GracePeriod(30, notices),
        rank=0,
    )
    ending.write_termination_message(code, committed=None, restored=None, failure=failure)
    return Termination.from_json(places.termination_file.read_bytes())


def test_the_last_word_says_so_of_a_failure_and_of_no_other_end(tmp_path: Path) -> None:
    assert last_word_of(tmp_path, 1, AWAY[0]).cause == Cause.STORAGE_UNAVAILABLE
    assert last_word_of(tmp_path, 1, ValueError("a bug")).cause is None
    assert last_word_of(tmp_path, 78, AWAY[0]).cause is None
