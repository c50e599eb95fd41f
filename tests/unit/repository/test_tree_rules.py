"""Rules about the tree and its words that no linter knows."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_blocks import ROOT, tracked_files

FILES = [ROOT / name for name in tracked_files()]


def test_the_operator_root_is_no_package() -> None:
    """With operator/__init__.py, Python started in the root finds it in place of its own operator module."""
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_no_folder_of_tests_is_a_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


PACKAGES = ("operator/stepkeeper_operator", "runtime/stepkeeper", "planners/stepkeeper_planners")
SOURCES = [
    path for path in FILES if path.suffix == ".py" and str(path.relative_to(ROOT)).startswith(PACKAGES)
]


def test_no_folder_of_a_package_holds_more_modules_than_a_reader_keeps_in_mind() -> None:
    n_modules = Counter(str(path.parent.relative_to(ROOT)) for path in SOURCES if path.name != "__init__.py")
    assert n_modules.keys() >= set(PACKAGES)
    assert {folder: n for folder, n in n_modules.items() if n > 16} == {}


def test_every_room_stands_on_the_map() -> None:
    """ARCHITECTURE.md has a line for each folder that lies directly in a package."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rooms = {
        path.relative_to(ROOT / package).parts[0]
        for package in PACKAGES
        for path in SOURCES
        if path.is_relative_to(ROOT / package) and len(path.relative_to(ROOT / package).parts) > 1
    }
    assert len(rooms) > 20
    assert sorted(room for room in rooms if f"`{room}/`" not in page) == []


def test_docstrings_open_with_what_is_done_or_is_there() -> None:
    """A first word such as What or Who hides the actor. Verbs of functions are held by the linter (D401)."""
    hiding = re.compile(r"(?:What|Who|Whom|Whose|Of|As|That|Which|Whether|How|Where)\b")
    found = [
        f"{path.relative_to(ROOT)}: {first}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and hiding.match(first := (ast.get_docstring(node) or "").split("\n", 1)[0])
    ]
    assert found == []


def test_modules_stay_readable_in_one_sitting() -> None:
    long = {
        str(path.relative_to(ROOT)): n_lines
        for path in FILES
        if path.suffix == ".py" and (n_lines := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert long == {}


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(
            r"(?:files\.pythonhosted|pypi|proxy\.golang|registry\.npmjs|deb\.debian)\.org",
            id="registry hosts",
        ),
        pytest.param(r"/(?:root|home/[a-z]+)/\.|/work/main|/tmp/brief", id="paths of one machine"),
    ],
)
def test_no_file_names(pattern: str) -> None:
    rule = re.compile(pattern)
    named = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in FILES
        if path != Path(__file__)
        and path.suffix not in {".png", ".sum"}
        and (match := rule.search(path.read_text(encoding="utf-8", errors="replace")))
    ]
    assert named == []


def test_both_locks_agree() -> None:
    """The operator's image gets the versions that the tests ran with."""

    def pins(name: str) -> set[str]:
        return set(re.findall(r"^[\w.-]+==[^ ]+", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE))

    assert pins("requirements-operator.lock") <= pins("requirements.lock")
    assert not [pin for pin in pins("requirements-operator.lock") if pin.startswith("torch")]


def test_every_file_that_the_map_names_is_there() -> None:
    """ARCHITECTURE.md writes operator/ and planners/ for their packages; other paths are the runtime's."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)`", page)
    roots = {"operator": "operator/stepkeeper_operator", "planners": "planners/stepkeeper_planners"}
    paths = [
        f"{roots[first]}/{rest}"
        if (first := name.partition("/")[0]) in roots
        else f"runtime/stepkeeper/{name}"
        for name in named
        if (rest := name.partition("/")[2]) is not None
    ]
    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("example", ["ddp", "fsdp2", "queued_resource", "text_lm"])
def test_an_examples_manifest_is_for_a_real_cluster(example: str) -> None:
    text = (ROOT / "examples" / example / "job.yaml").read_text(encoding="utf-8")
    assert [word for word in ("PJRT", "hostPath", "object-storage", "localhost") if word in text] == []


OUT = re.compile(
    r"\b(?:tells?|told|telling|whoever|anew|mend(?:s|ed|ing)?|heed(?:s|ed|ing)?|deaf|bur(?:y|ies|ied)"
    r"|last\s+words?|(?:go|goes|going|went|gone)\s+on)\b",
    re.IGNORECASE,
)
"""Words that are out. Write show, report, ask, again, fix, handle, termination message, continue."""

CODE = ("operator/", "runtime/", "planners/", "examples/", "benchmarks/")
HISTORY = ("CHANGELOG.md", "docs/adr/")
WITH_PROSE = [
    name
    for name in tracked_files("*.py", "*.md")
    if (name.startswith(CODE) if name.endswith(".py") else not name.startswith(HISTORY))
]
PROSE = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def read_prose(name: str) -> Iterator[tuple[int, str]]:
    """Yield the strings and comments of a module, or a whole page, each with the number of its first line."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".md"):
        yield 1, text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in PROSE:
            yield token.start[0], token.string


@pytest.mark.parametrize("suffix", [".py", ".md"])
def test_no_word_that_is_out_is_used(suffix: str) -> None:
    names = [name for name in WITH_PROSE if name.endswith(suffix)]
    assert len(names) > 30
    found = [
        f"{name}:{first + prose[: word.start()].count(chr(10))}: {word[0]}"
        for name in names
        for first, prose in read_prose(name)
        for word in OUT.finditer(prose)
    ]
    if found:
        pytest.fail("\n".join(found), pytrace=False)
