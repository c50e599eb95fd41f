"""Test the state of a log: its HEAD, its live commits, and the begins that are refused."""

import pytest

from stepkeeper.errors import FencedError, RestoreError
from stepkeeper.log import Log
from stepkeeper.policy.keep import AnyOf, BestN, EveryNSteps, KeepPolicy, LastN, MaxAge
from stepkeeper.retention.deletable import choose_deletable
from stepkeeper_testing.checkpoints import SmallRoot


@pytest.mark.parametrize(
    ("words", "line", "others"),
    [
        pytest.param("", "", [], id="an empty root"),
        pytest.param("begin 10 20 30", "30 20 10", [], id="commits make a line"),
        pytest.param("begin 10 20 begin", "20 10", [], id="a begin goes on from HEAD"),
        pytest.param("begin 10 20 begin@1", "10", [20], id="a begin goes on from what it names"),
        pytest.param("begin 10 20 begin@1 15", "15 10", [20], id="what comes next leaves the others out"),
        pytest.param("begin 10 20 30 back@1 40", "40 10", [20, 30], id="the process that runs goes back"),
        pytest.param("begin 10 20 scratch", "", [10, 20], id="from scratch"),
        pytest.param("begin 10 20 30 40 -2 -3", "40 10", [], id="what is deleted leaves the line"),
        pytest.param("begin 10 20 30 -2 !3", "10", [], id="condemned: HEAD is the nearest live ancestor"),
        pytest.param("begin 10 20 *1", "20 10", [], id="restored: HEAD stays"),
        pytest.param("begin 10 !1 scratch begin", "", [], id="a start from scratch counts until a commit"),
        pytest.param("begin?s9 scratch begin?s9 1", "1", [], id="also before another writer's step"),
        pytest.param("begin 10 20 branch", "20 10", [], id="HEAD stays until a branch has a commit"),
        pytest.param("begin 10 20 branch 1 2", "2 1", [10, 20], id="a branch is a line of its own"),
        pytest.param("begin 20 branch begin 21", "21 20", [], id="a branch without a commit is nothing"),
        pytest.param("begin 10 20 branch !2", "10", [], id="condemned before a branch has a commit"),
        pytest.param("begin 10 20 branch !2 back@1 11", "11 10", [], id="gone back to before it has one"),
        pytest.param("begin 20 branch voidx40", "20", [], id="an index between the branch and its commit"),
        pytest.param("begin 20 branch voidx40 1", "1", [20], id="and the commit after that"),
        pytest.param("begin?s9", "<9", [], id="another writer's step"),
        pytest.param("begin?s300 301 302", "302 301 <300", [], id="commits after another writer's step"),
        pytest.param("begin?s300 begin?s400", "<400", [], id="without a commit a start chooses again"),
        pytest.param("begin?s300 begin", "<300", [], id="or keeps what was chosen"),
        pytest.param("begin?s300 301 begin?s400", "301 <300", [], id="with a commit it is not asked"),
        pytest.param("begin?s300 301 302 !1", "302 <300", [], id="what is condemned leaves what is below"),
        pytest.param("begin?s300 301 302 !1 !2 begin?s400", "<300", [], id="all condemned: theirs again"),
        pytest.param("begin?s300 301 302 -1 -2", "<300", [], id="all deleted: theirs again"),
        pytest.param("begin?s300 301 begin@s100 101", "101 <100", [301], id="a step of theirs is named"),
        pytest.param("begin?s300 back@s100", "<100", [], id="the process that runs goes back to such a step"),
        pytest.param("begin?s900 branch", "<900", [], id="a branch leaves theirs until it has a commit"),
        pytest.param("begin?s900 branch 5", "5", [], id="a branch has nothing of theirs below it"),
    ],
)
def test_head_and_its_line_are(words: str, line: str, others: list[int]) -> None:
    root = SmallRoot(words=words)
    state = root.log.state
    below = state.line[-1].legacy if state.line else state.legacy
    found = [*(str(record.step) for record in state.line), *([f"<{below.step}"] if below else [])]
    assert " ".join(found) == line
    on_line = {record.slot for record in state.line}
    assert [record.step for record in state.live if record.slot not in on_line] == others
    assert Log(root.store).open() == state


@pytest.mark.parametrize(
    ("words", "begin", "says"),
    [
        ("begin 10", "begin@0", r"commit 0 doesn't exist.* live commits: 1 \(step 10\)"),
        ("begin 10 !1", "begin@1", "commit 1 is quarantined; live commits: none"),
        ("begin 10 20 !1", "back@1", "commit 1 is quarantined"),
        ("begin 10 !1", "begin", r"quarantined: 1 \(step 10\); on abandoned branches: none\..*scratch=True"),
        ("begin 10 !1", "begin?s9", "no latest one"),
        pytest.param(
            "begin 10 begin !1", "begin", "quarantined", id="a begin on a condemned one is no answer"
        ),
        pytest.param("begin 10 !1 scratch begin 10 !5", "begin", "quarantined", id="nor one before a commit"),
        pytest.param(
            "begin 10 20 30 branch 1 !5 !3 !2 !1",
            "begin",
            r": 1 \(step 10\), 2 \(step 20\), 3",
            id="nothing is left",
        ),
        pytest.param(
            "begin 10 20 scratch 1 !4",
            "begin",
            r": 1 \(step 10\), 2 \(step 20\)\. .*base=SEQUENCE",
            id="left by scratch",
        ),
        pytest.param("begin 10 20 begin@1 !1", "begin", "no latest one", id="left by going back"),
        pytest.param("begin 9 branch 1 !3", "begin", r"branches: 1 \(step 9\)", id="left by a branch"),
    ],
)
def test_a_root_without_a_latest_commit_is_begun_only_by_who_says_where_from(
    words: str, begin: str, says: str
) -> None:
    root = SmallRoot(words=words)
    for log in (root.log, Log(root.store)):
        root.log, before = log, log.open()
        with pytest.raises(RestoreError, match=says):
            root.play(begin)
        assert log.state == before, "nothing was appended"
        if "@" not in begin:
            with pytest.raises(RestoreError, match="no latest one"):
                log.latest(root.claim)
    root.play("scratch")
    assert root.log.latest(root.claim) is None


def test_on_what_head_is_already_no_entry_is_put() -> None:
    for words in ("begin 1 2", "begin?s9 back@s8"):
        root = SmallRoot(words=words)
        claim, tail = root.claim, root.log.state.tail
        assert root.play("back@2" if root.log.state.head else "back@s8") == tail
        assert root.claim == claim


@pytest.mark.parametrize("word", ["back@1", "back@2", "back@s8", "branch"])
def test_only_a_claim_that_holds_is_followed_by_another_of_its_process(word: str) -> None:
    root = SmallRoot(words="begin 1 2")
    Log(root.store).begin(take_over=True)
    with pytest.raises(FencedError, match="claim 0 is stale"):
        root.play(word)


GOING = {
    "the newest are kept": ("begin 10 20 30 40 50", LastN(2), None, [10, 20, 30]),
    "multiples too": (
        "begin 10 20 30 40 50 60 70 80 90",
        AnyOf((LastN(1), EveryNSteps(40))),
        None,
        [10, 20, 30, 50, 60, 70],
    ),
    "the newest verified is kept": ("begin 10 20 30 40 50", LastN(1), [1, 2], [10, 30, 40]),
    "without a verified one nothing goes": ("begin 10 20 30 40 50", LastN(1), [], []),
    "restored is verified": ("begin 10 20 30 40 50 *4", LastN(1), [], [10, 20, 30]),
    "a condemned one neither counts nor goes": ("begin 10 20 30 !3", LastN(1), None, [10]),
    "gone back: nothing has passed it": ("begin 10 20 30 begin@1", LastN(5), None, []),
    "what passes it isn't verified": ("begin 10 20 30 begin@1 25", LastN(5), [1], []),
    "it has passed one": ("begin 10 20 30 begin@1 25", LastN(5), [1, 5], [20]),
    "it has passed both": ("begin 10 20 30 begin@1 25 30", LastN(5), [1, 6], [20, 30]),
    "one from before has passed nothing": ("begin 100 20 begin@1 10", LastN(5), None, []),
    "one of now has": ("begin 100 20 begin@1 10 20", LastN(5), None, [20]),
    "a root without HEAD loses nothing": ("begin 10 20 scratch", LastN(1), None, []),
    "the line is in the order of commits": ("begin 30 10 20 10", LastN(2), None, [30, 10]),
    "HEAD and a verified one stay anyway": ("begin 10 20 30", EveryNSteps(20), [1], []),
    "HEAD stays anyway": ("begin 10 20 30", EveryNSteps(20), None, [10]),
    "before a branch has a commit": ("begin 10 20 30 branch", LastN(1), None, []),
    "a branch spares the line": ("begin 10 20 branch 1 2 3 9", LastN(1), None, [1, 2, 3]),
    "a branch has passed one step": ("begin 10 20 branch 10", LastN(1), None, [10]),
    "a branch has passed all": ("begin 10 20 branch 25", LastN(2), None, [10, 20]),
    "by metrics too": ("begin 10 20 branch 25", BestN(1, "loss", "min"), None, [10, 20]),
}


@pytest.mark.parametrize(("words", "policy", "verified", "steps"), GOING.values(), ids=GOING)
def test_of_commits_only_those_go(
    words: str, policy: KeepPolicy, verified: list[int] | None, steps: list[int]
) -> None:
    state = SmallRoot(words=words).log.state
    chosen = choose_deletable(state, policy, list(state.commits) if verified is None else verified)
    assert [state.commits[slot].step for slot in chosen] == steps


def test_metrics_are_those_of_the_commits_and_times_those_of_the_store() -> None:
    root = SmallRoot(words="begin")
    for step, loss in ((10, "3.5"), (20, "0.5"), (30, "nan"), (40, "2.5"), (50, "none")):
        root.save(step, metrics={"loss": loss})
    state, verified = root.log.state, range(1, 6)
    assert choose_deletable(state, BestN(1, "loss", "min"), verified) == (1, 3, 4)
    assert choose_deletable(state, BestN(2, "loss", "max"), verified) == (2, 3)
    assert choose_deletable(state, MaxAge(150), verified, {1: 100, 2: 200, 3: 300, 4: 300, 5: 300}) == (1,)
    assert choose_deletable(state, MaxAge(150), verified) == (), "where the store doesn't say, none is old"
