"""The images of the cluster and of the product, each built once for its content."""

import contextlib
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from stepcluster import dns, nodeconfig, ociimage, rootfs
from stepcluster.binaries import Binaries, cache_root
from stepcluster.errors import BuildError, CommandError
from stepcluster.machine import run, say
from stepcluster.ociimage import Entry, Layer, Settings, tree

ROOT = Path(__file__).parents[3]
WHEEL_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "operator", "runtime", "planners")
OPERATOR_USER = "65532:65532"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
SHELL_IMAGE = "localhost/busybox:1"
PIP_TIMEOUT_S = 900.0
KEPT_ARCHIVES = 5
LAYOUT = 1
"""Raised when what this module puts into a layer changes."""


def pause(binaries: Binaries) -> Path:
    layer = _layer(
        "pause", [binaries.folder.name], lambda _: [Entry(path="pause", source=Path(binaries["pause"]))]
    )
    return _image(nodeconfig.PAUSE_IMAGE, [layer], Settings(entrypoint=["/pause"], user="65534:65534"))


def coredns(binaries: Binaries) -> Path:
    layer = _layer(
        "coredns", [binaries.folder.name], lambda _: [Entry(path="coredns", source=Path(binaries["coredns"]))]
    )
    return _image(dns.IMAGE, [layer], Settings(entrypoint=["/coredns"]))


def shell() -> Path:
    return _image(
        SHELL_IMAGE, [_shell_layer()], Settings(environment={"PATH": SYSTEM_PATH}, command=["/bin/sh"])
    )


def build_wheel() -> Path:
    """Return the wheel of this tree; build it if the sources have changed."""
    folder = cache_root() / "wheels" / _key(_content(ROOT / name for name in WHEEL_SOURCES))
    found = list(folder.glob("*.whl"))
    if found:
        return found[0]
    say("images: building the wheel")
    with _workspace() as workspace:
        options = ["--wheel", "--no-isolation", f"--outdir={workspace}/wheel"]
        try:
            run([sys.executable, "-m", "build", *options, ROOT], timeout_s=300)
        except CommandError as error:
            raise BuildError(f"the wheel could not be built: {error}") from error
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            Path(workspace, "wheel").rename(folder)
        except OSError:
            # Another process was first, with the same wheel.
            if not folder.exists():
                raise
    return next(iter(folder.glob("*.whl")))


def operator(wheel: Path | None = None, *, tag: str = "dev") -> tuple[str, Path]:
    """Name and archive of the operator's image: a wheel, or this tree's, and the locked packages of `operator`."""
    lock = ROOT / "requirements-operator.lock"
    packages = _layer(
        "operator-packages", [lock.read_text(encoding="utf-8"), sys.version], _installed(lock, "opt/packages")
    )
    name = f"localhost/stepkeeper-operator:{tag}"
    layers = [_shell_layer(), _python_layer(), packages, _wheel_layer(wheel or build_wheel())]
    settings = Settings(
        environment=_python_environment("/opt/stepkeeper:/opt/packages"),
        entrypoint=["python", "-m", "stepkeeper_operator"],
        user=OPERATOR_USER,
        folder="/tmp",
    )
    return name, _image(name, layers, settings)


def trainer(app: Path, *, name: str | None = None, folder: str = "/app") -> tuple[str, Path]:
    """Name and archive of an image with the wheel, and with the folder `app` in /app under its own name.

    torch isn't in it: the pod mounts the node's torch environment, read-only, at /opt/torch. Its processes start in
    `folder`.
    """
    name = name or "localhost/stepkeeper-trainer:dev"
    files = [Entry(path="app"), *tree(app, f"app/{app.name}"), Entry(path="opt"), Entry(path="opt/torch")]
    own = _layer("app", [_content([app]), app.name], lambda _: files)
    layers = [_shell_layer(), _python_layer(), _wheel_layer(build_wheel()), own]
    settings = Settings(
        environment=_python_environment("/app:/opt/stepkeeper:/opt/torch"), command=["python"], folder=folder
    )
    return name, _image(name, layers, settings)


def _python_environment(python_path: str) -> dict[str, str]:
    return {
        "PATH": SYSTEM_PATH,
        "PYTHONPATH": python_path,
        "PYTHONUNBUFFERED": "1",
        "LANG": "C.UTF-8",
        "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt",
    }


def _shell_layer() -> Layer:
    return _layer("shell", [rootfs.PASSWD], lambda _: rootfs.shell_entries())


def _python_layer() -> Layer:
    of = [sys.version, sys.base_prefix, *rootfs.NOT_IN_A_POD]
    return _layer("python", of, lambda workspace: _with_bytecode(rootfs.python_entries(), workspace))


def _wheel_layer(wheel: Path) -> Layer:
    return _layer("wheel", [_content([wheel])], _installed(wheel, "opt/stepkeeper"))


def _installed(what: Path, target: str) -> Callable[[Path], Iterable[Entry]]:
    """Entries of a wheel, or of everything in a lock file, and of nothing else, below `target`."""

    def entries(workspace: Path) -> Iterable[Entry]:
        say(f"images: installing {what.name}")
        source = [str(what)] if what.suffix == ".whl" else ["--require-hashes", "-r", str(what)]
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]
        where = f"--target={workspace / 'pip'}"
        try:
            run([sys.executable, "-m", "pip", "install", *options, where, *source], timeout_s=PIP_TIMEOUT_S)
        except CommandError as error:
            raise BuildError(f"{what} could not be installed into an image: {error}") from error
        top = [Entry(path="opt"), *tree(workspace / "pip", target, skip=("__pycache__", "bin"))]
        return _with_bytecode(top, workspace)

    return entries


def _with_bytecode(entries: Iterable[Entry], workspace: Path) -> list[Entry]:
    """Add bytecode for all modules among the entries: an image's file system can't take it later."""
    found = list(entries)
    copies = workspace / "modules"
    for entry in found:
        if entry.source is not None and entry.path.endswith(".py"):
            copy = copies / entry.path
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(entry.source, copy)
    # Bytecode that doesn't compare times, since all files have one time. Some files are templates that don't compile.
    compile_all = ["-m", "compileall", "-qq", "-j2", "--invalidation-mode=unchecked-hash"]
    subprocess.run([sys.executable, *compile_all, "-s", copies, "-p", "/", copies], check=False)
    for folder in copies.rglob("__pycache__"):
        found.extend(tree(folder, str(folder.relative_to(copies)), skip=()))
    return found


def _layer(name: str, of: Iterable[str], entries: Callable[[Path], Iterable[Entry]]) -> Layer:
    """Return the layer with this content, from the cache or made now."""
    path = _images_folder() / f"layer-{name}-{_key(chr(0).join([str(LAYOUT), *of]))}.tar"
    if not path.exists():
        with _workspace() as workspace:
            partial = Path(workspace, "layer.tar")
            ociimage.write_layer(partial, entries(Path(workspace)))
            partial.rename(path)
    return ociimage.read_layer(path)


def _image(name: str, layers: list[Layer], settings: Settings) -> Path:
    """Return the archive of the image; its file name is a digest of the content."""
    key = _key(repr((name, settings, [layer.digest for layer in layers])))
    short_name = name.rpartition("/")[2].replace(":", "-")
    path = _images_folder() / f"{short_name}-{key}.tar"
    if not path.exists():
        # Another process may make it at the same time: each has a file of its own, and either will do.
        with _workspace() as workspace:
            partial = Path(workspace, "image.tar")
            ociimage.write_image(partial, name, layers, settings)
            partial.rename(path)
        _forget_older(short_name)
    return path


def _forget_older(name: str) -> None:
    """Delete all but the newest few archives of one image: each change of the tree makes one."""
    # Another process may be doing the same.
    with contextlib.suppress(FileNotFoundError):
        archives = sorted(_images_folder().glob(f"{name}-*.tar"), key=lambda path: path.stat().st_mtime)
        for path in archives[:-KEPT_ARCHIVES]:
            path.unlink()


def _images_folder() -> Path:
    folder = cache_root() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _workspace() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=_images_folder())


def _content(paths: Iterable[Path]) -> str:
    """Compute a digest of files and folders, without Python's caches."""
    digest = hashlib.sha256()
    for top in paths:
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(top.parent)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
