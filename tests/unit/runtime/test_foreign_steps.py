"""Steps of other writers are known by the names of their objects."""

from stepkeeper.log.foreign_steps import find_steps_below, find_steps_in
from stepkeeper.storage import ObjectStat
from stepkeeper_testing.checkpoints import SmallRoot

NONCE = "a" * 32


def stats(*paths: str) -> list[ObjectStat]:
    return [ObjectStat(path=path, size_bytes=1) for path in paths]


def test_steps_are_found_by_the_names_that_writers_give_them() -> None:
    finished = ["100", "step-200", "step_250", "step260", "checkpoint-300", "global_step400", "iter_0000450"]
    found = find_steps_in(
        stats(
            *(f"{folder}/.metadata" for folder in (*finished, "500", "notes-600")),
            f"100/7-{NONCE}/.metadata",
            f"150/7-{NONCE}/.metadata",
            f"150/7-{NONCE}/__0_0.distcp",
            "checkpoint_350/__0_0.distcp",
            "500/.manager_metadata",
            "700/notes.txt",
            "step-800/sub/__0_0.distcp",
            "900",
            ".stepkeeper/log/00000000.json",
        )
    )
    assert [each.folder for each in found if each.is_finished] == ["500", *reversed(finished)]
    assert [each.step for each in found] == [500, 450, 400, 350, 300, 260, 250, 200, 100]
    assert found[0].writer == "torch_xla"


def test_what_lies_below_a_line_is_what_it_went_on_from_and_all_that_is_older() -> None:
    found = find_steps_in(stats(*(f"{step}/.metadata" for step in (100, 200, 300, 400))))
    root = SmallRoot()
    assert len(find_steps_below(root.log.open(), lambda: found)) == 4
    root.play("begin?s300")
    assert len(find_steps_below(root.log.state, lambda: found)) == 4, "nothing is committed yet"
    root.play("301")
    assert [each.step for each in find_steps_below(root.log.state, lambda: found)] == [300, 200, 100]
    root.play("scratch 1")

    def nothing_to_find() -> tuple[()]:
        raise AssertionError("there can't be any")

    assert find_steps_below(root.log.state, nothing_to_find) == ()
