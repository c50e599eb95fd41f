"""A state held against a checkpoint: what is read, and one report of all that differs."""

from collections.abc import Sequence
from typing import Any

import pytest

from stepkeeper_planners.errors import LoadMismatchError, PatternError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout, whole_tensor
from stepkeeper_planners.loading.differences import Differences, build_mismatch_error
from stepkeeper_planners.loading.load_request import LoadRequest
from stepkeeper_planners.loading.matching import compare
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_planners.loading.state_reads import StateReads, ValueRead
from stepkeeper_planners.loading.stored_state import StoredState, StoredTensor

ALONE = Ranks(rank=0, world_size=1)


def stored(dtype: str = "float32", *shape: int, data: object = None) -> StoredTensor:
    return StoredTensor(dtype=dtype, global_shape=shape, boxes=(Box.whole(shape),), data=data)


def tensors(*names: str) -> list[TensorLayout]:
    return [whole_tensor(name, "float32", (), ALONE) for name in names]


def checkpoint(*names: str, values: Sequence[str] = ()) -> StoredState:
    return StoredState(tensors={name: stored() for name in names}, values=values)


def plan_load(
    request: LoadRequest, stored: StoredState, ranks: Ranks, rules: LoadRules | None = None
) -> StateReads:
    reads, differences = compare(request, stored, ranks, rules)
    if differences:
        raise build_mismatch_error([differences])
    return reads


def refused(wanted: LoadRequest, of: StoredState, ranks: Ranks = ALONE, **rules: Any) -> LoadMismatchError:
    with pytest.raises(LoadMismatchError) as caught:
        plan_load(wanted, of, ranks, LoadRules(**rules))
    return caught.value


def test_one_report_of_all_that_differs() -> None:
    names = ["fine", "absent", "shape", "dtype", "kind", "holes", "twice"]
    of = StoredState(
        tensors={
            "fine": stored("float32", 2, 2),
            "shape": stored("float32", 2, 3),
            "dtype": stored("bfloat16", 2, 2),
            "holes": StoredTensor(
                dtype="float32", global_shape=(2, 2), boxes=(Box(offsets=(0, 0), sizes=(1, 2)),)
            ),
            "twice": StoredTensor(
                dtype="float32",
                global_shape=(2, 2),
                boxes=(Box.whole((2, 2)), Box(offsets=(0, 0), sizes=(1, 2))),
            ),
            "more": stored("float32", 1),
            "count": stored("int64"),
        },
        values=["step", "kind", "extra"],
    )
    wanted = LoadRequest(
        layouts=[whole_tensor(name, "float32", (2, 2), ALONE) for name in names],
        values={key: (key,) for key in ("count", "epoch", "step")},
    )
    error = refused(wanted, of)
    assert error.missing == ("absent", "epoch")
    assert error.unexpected == ("extra", "more")
    assert set(error.mismatched) == {"shape", "dtype", "kind", "holes", "twice", "count"}
    text = str(error)
    assert "(2, 3) in the checkpoint, (2, 2) in the state" in text
    assert "bfloat16 in the checkpoint, float32 in the state" in text
    assert "lack 2 of 4 elements" in text
    assert "overlap" in text
    assert "cast=True" in text
    assert "strict=False" in text
    assert "exclude=('extra', 'more') loads the rest" in text


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        ("{}.w", "module.{}.w", "begin with 'module.' (of DistributedDataParallel"),
        ("model._orig_mod.{}.w", "model.{}.w", "'model._orig_mod.' (of torch.compile"),
        ("model.{}.w", "{}.w", "the state's names begin with 'model.'"),
        ("l{}.w", "l{}._checkpoint_wrapped_module.w", "have a part '_checkpoint_wrapped_module'"),
    ],
)
def test_the_rename_that_would_fix_all_is_named(mine: str, theirs: str, words: str) -> None:
    wanted = LoadRequest(layouts=tensors(*(mine.format(n) for n in range(20)), "lr"))
    error = refused(wanted, checkpoint(*(theirs.format(n) for n in range(20))))
    assert "One rename fixes 20 of 21 missing names" in str(error)
    assert words in str(error)
    assert f"{mine.format(0)!r} in the state is {theirs.format(0)!r} in the checkpoint" in str(error)


def test_a_misspelt_name_is_shown_beside_its_near_one() -> None:
    error = refused(LoadRequest(layouts=tensors("head.weigth", "a")), checkpoint("head.weight", "zzz"))
    assert "'head.weigth' may be 'head.weight'" in str(error)
    assert "'a' may" not in str(error)


def test_items_and_exclude_bound_what_is_compared_on_both_sides() -> None:
    wanted = LoadRequest(layouts=tensors("model.a.w", "model.b.w", "new"), values={"step": ("step",)})
    of = checkpoint("model.a.w", "model.b.w", "optim.a", values=["step", "other"])
    assert refused(wanted, of).unexpected == ("optim.a", "other")
    reads = plan_load(wanted, of, ALONE, LoadRules(items=["model"]))
    assert [piece.fqn for piece in reads.pieces] == ["model.a.w", "model.b.w"]
    assert reads.skipped == ("new", "step")
    reads = plan_load(wanted, of, ALONE, LoadRules(items=["model.*.w", "step"], exclude=["model.b"]))
    assert [piece.fqn for piece in reads.pieces] == ["model.a.w"]
    assert [read.fqn for read in reads.values] == ["step"]
    assert refused(wanted, of, exclude=["optim", "other"]).missing == ("new",)
    assert refused(wanted, of, items=["model", "optim"]).unexpected == ("optim.a",)
    assert refused(wanted, of, items=["model", "modle"]).mismatched.keys() == {"modle"}
    # "mod" is not above "model".
    assert plan_load(wanted, of, ALONE, LoadRules(items=["model"], exclude=["mod", "[x"])).pieces


@pytest.mark.parametrize("rules", [{"items": "model"}, {"exclude": "optim"}])
def test_one_string_is_no_collection_of_patterns(rules: dict[str, Any]) -> None:
    with pytest.raises(PatternError, match=f"write {next(iter(rules))}="):
        LoadRules(**rules)


def test_not_strict_loads_what_both_have() -> None:
    wanted = LoadRequest(layouts=tensors("a", "new"), values={"step": ("step",), "epoch": ("epoch",)})
    reads = plan_load(wanted, checkpoint("a", "old", values=["step"]), ALONE, LoadRules(strict=False))
    assert [piece.fqn for piece in reads.pieces] == ["a"]
    assert [read.fqn for read in reads.values] == ["step"]
    assert reads.skipped == ("new", "epoch")
    assert reads.unread == ("old",)


def test_not_strict_still_refuses_other_shapes_and_a_checkpoint_of_something_else() -> None:
    wanted = LoadRequest(layouts=tensors("w", "v"))
    other = StoredState(tensors={"w": stored("float32", 3), "v": stored()})
    assert refused(wanted, other, strict=False).mismatched.keys() == {"w"}
    nothing = refused(wanted, checkpoint("module.w", "module.v"), strict=False)
    assert nothing.missing == ("v", "w")
    assert "'module.'" in str(nothing)


@pytest.mark.parametrize(
    ("of", "to", "allowed"),
    [
        ("float32", "bfloat16", True),
        ("bool", "int8", True),
        ("complex64", "float32", False),
        ("float32", "int64", False),
    ],
)
def test_cast_keeps_the_kind(of: str, to: str, allowed: bool) -> None:
    wanted = LoadRequest(layouts=[whole_tensor("w", to, (), ALONE)])
    reads, differences = compare(wanted, StoredState(tensors={"w": stored(of)}), ALONE, LoadRules(cast=True))
    assert bool(differences) is not allowed
    assert len(reads.pieces) == allowed
    uncast = refused(wanted, StoredState(tensors={"w": stored(of)}))
    assert ("cast=True" in str(uncast)) is allowed
    if not allowed:
        assert f"only {of} can represent" in differences.mismatched["w"]


def test_tied_tensors_are_read_once_under_any_of_their_names() -> None:
    wanted = LoadRequest(layouts=tensors("embed"), aliases={"head": "embed"})
    for names in (["embed"], ["head"], ["embed", "head"]):
        reads = plan_load(wanted, checkpoint(*names), ALONE)
        assert [(piece.fqn, piece.stored_fqn) for piece in reads.pieces] == [("embed", names[0])]
    assert refused(wanted, checkpoint("other")).missing == ("embed",)
    # Asked for by its second name, it is loaded; by neither, it isn't.
    assert plan_load(wanted, checkpoint("embed"), ALONE, LoadRules(items=["head"])).pieces
    assert not plan_load(wanted, checkpoint("embed"), ALONE, LoadRules(exclude=["embed", "head"])).pieces


def test_a_container_that_was_stored_in_one_piece_is_taken_apart() -> None:
    wanted = LoadRequest(
        layouts=[],
        values={"schedule.last": ("schedule", "last"), "groups.0.lr": ("groups", 0, "lr")},
        containers=["schedule", "groups", "groups.0", "optim", "optim.state"],
    )
    reads = plan_load(wanted, checkpoint(values=["schedule", "groups", "optim.state"]), ALONE)
    stored_values = {"schedule": {"last": 3}, "groups": [{"lr": 0.5}]}
    assert [read.build_value(stored_values, None, ALONE) for read in reads.values] == [3, 0.5]
    with pytest.raises(LoadMismatchError, match="its values were not") as caught:
        reads.values[0].build_value({"schedule": {}}, None, ALONE)
    assert caught.value.missing == ("schedule.last",)


def test_each_rank_reads_its_own_or_all_to_make_one() -> None:
    def total(values: Sequence[Any], ranks: Ranks) -> object:
        return [sum(values), ranks.rank]

    wanted = LoadRequest(layouts=[], per_rank={"loader": total, "rng": None})
    same = checkpoint(values=[f"{name}@{rank}/2" for name in ("loader", "rng") for rank in range(2)])
    reads = plan_load(wanted, same, Ranks(rank=1, world_size=2)).values
    assert [read.stored_names for read in reads] == [("loader@1/2",), ("rng@1/2",)]
    assert reads[0].build_value({"loader@1/2": 5}, total, Ranks(rank=1, world_size=2)) == 5
    third = Ranks(rank=2, world_size=3)
    error = refused(wanted, same, third)
    assert set(error.mismatched) == {"rng"}
    assert "2 ranks saved" in str(error)
    assert "3 load" in str(error)
    assert "resize=" in str(error)
    (read,) = plan_load(wanted, same, third, LoadRules(exclude=["rng"])).values
    assert read == ValueRead(fqn="loader", stored_names=("loader@0/2", "loader@1/2"), saved_world_size=2)
    assert read.build_value({"loader@0/2": 1, "loader@1/2": 2}, total, third) == [3, 2]


def test_what_is_per_rank_on_one_side_only_is_said() -> None:
    mine = LoadRequest(layouts=[], per_rank={"loader": None})
    assert "Load it once without PerRank" in str(refused(mine, checkpoint(values=["loader"])))
    plain = LoadRequest(layouts=[], values={"loader": ("loader",)})
    error = refused(plain, checkpoint(values=["loader@0/1"]))
    assert error.mismatched.keys() == {"loader"}
    assert not error.missing
    assert not error.unexpected
    assert refused(LoadRequest(layouts=[]), checkpoint(values=["loader@0/1"])).unexpected == ("loader@0/1",)
    assert refused(
        mine, checkpoint(values=["loader@1/2"]), Ranks(rank=0, world_size=2)
    ).mismatched.keys() == {"loader"}


def test_one_report_for_all_ranks_says_which_where_they_differ() -> None:
    both = Differences(missing=("a",), unexpected=("x",))
    error = build_mismatch_error(
        [both, Differences(missing=("a", "b"), mismatched={"c": "shape"}), both, None]
    )
    assert error.missing == ("a", "b")
    assert error.ranks == {"a": (0, 1, 2), "x": (0, 2), "b": (1,), "c": (1,)}
    assert "b (on rank 1)" in str(error)
    assert "x (on ranks 0, 2)" in str(error)
    assert build_mismatch_error([both, both]).ranks == {}
    # What a rank left out because there was too much of it is not taken for an agreement of the others.
    many = Differences(missing=tuple(f"n{n:04}" for n in range(1200)))
    assert build_mismatch_error([many, many.short()]).ranks == {}
    assert len(build_mismatch_error([many, many.short()]).missing) == 1200


PER_RANK, PRIME = "If the names below 'loader' change", "Call prime_optimizer(optimizer) before the load"
AVG, LR = "optimizer.state.{}.exp_avg", "optimizer.param_groups.0.lr"


@pytest.mark.parametrize(
    ("mine", "theirs", "hints"),
    [
        pytest.param(["loader.a"], ["loader.b", "loader.x.y"], [PER_RANK], id="names that change"),
        pytest.param([LR], [AVG.format("a.w"), LR], [PRIME], id="an optimizer without state"),
        pytest.param([LR], ["model.state.0.gate", LR], [], id="a module called state"),
        pytest.param(
            [AVG.format(1), LR],
            [AVG.format(0), AVG.format(1), LR, "other.state.0.exp_avg", "other.param_groups.0.lr"],
            [PRIME],
            id="an optimizer without state beside one that has some",
        ),
    ],
)
def test_what_to_do_is_said_where_the_names_tell_the_cause(
    mine: list[str], theirs: list[str], hints: list[str]
) -> None:
    def split(names: list[str]) -> tuple[list[str], list[str]]:
        return [name for name in names if ".state." in name], [
            name for name in names if ".state." not in name
        ]

    (tensor_names, values), (stored_tensors, stored_values) = split(mine), split(theirs)
    wanted = LoadRequest(
        layouts=tensors("model.w", *tensor_names), values={name: tuple(name.split(".")) for name in values}
    )
    text = str(refused(wanted, checkpoint("model.w", *stored_tensors, values=stored_values)))
    assert all(hint in text for hint in hints)
    assert hints or not any(hint in text for hint in (PER_RANK, PRIME))


def test_two_stored_tensors_are_not_put_into_one() -> None:
    wanted = LoadRequest(layouts=tensors("embed"), aliases={"head": "embed"})
    one, two = stored(data="here"), stored(data="there")
    assert plan_load(wanted, StoredState(tensors={"embed": one, "head": one}), ALONE).pieces
    assert "embed, head" in str(refused(wanted, StoredState(tensors={"embed": one, "head": two})))
    assert refused(wanted, StoredState(tensors={"embed": stored(), "head": stored("int8")})).mismatched
