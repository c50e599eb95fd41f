"""Paths that a file claims: none makes lists that are longer than what the file holds."""

from typing import Any

import pytest

from stepkeeper_planners.errors import SourceError
from stepkeeper_planners.state.nesting import rebuild_nesting

MANY = 2000


@pytest.mark.parametrize(
    "paths",
    [
        pytest.param({f"{i}\0empty": (str(i), MANY, MANY) for i in range(MANY)}, id="long lists"),
        pytest.param({"w": ("w",) * 5000}, id="deep"),
        pytest.param({"w": 3}, id="a number"),
        pytest.param({"w": (["x"],)}, id="a list as a key"),
        pytest.param({"w": (1.5,)}, id="half"),
        pytest.param({"w": ("x",), "x\0number": ("x",)}, id="a word as a number"),
        pytest.param({"w": ("9" * 5000,), "w\0number": ("9" * 5000,)}, id="a number that is too long"),
        pytest.param({"w": ("x",), "v": ("x",)}, id="two in one place"),
        pytest.param({"w": ("x",), "v": ("x", "y")}, id="one in another"),
        pytest.param({"w": ("x",), "v\0empty": ("x",)}, id="an empty dict in its place"),
        pytest.param(
            {"w": ("1",), "v": ("01",), "a\0number": ("1",), "b\0number": ("01",)}, id="one number twice"
        ),
    ],
)
def test_paths_that_are_none_are_refused(paths: Any) -> None:
    with pytest.raises(SourceError, match=r"^run/\.metadata: the path .* of '\w+"):
        rebuild_nesting({"w": 1, "v": [1]}, paths, where="run/.metadata")


def test_items_without_an_entry_are_none() -> None:
    assert rebuild_nesting({"w": 1}, {"w": ("a", 5)}, where="run/.metadata") == {"a": [None] * 5 + [1]}
