"""Collect the files of the images: a shell, and the Python that runs this with its libraries, from the machine."""

import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from stepcluster.machine import run
from stepcluster.ociimage import Entry, tree

PASSWD = (
    "root:x:0:0:root:/root:/bin/sh\nstepkeeper:x:65532:65532::/tmp:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n"
)
GROUP = "root:x:0:\nstepkeeper:x:65532:\nnobody:x:65534:\n"
CERTIFICATES = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pki/tls/certs/ca-bundle.crt"))
FOLDERS = ("dev", "etc", "proc", "root", "run", "sys", "usr", "var")
NOT_IN_A_POD = (
    *("__pycache__", "test", "tests", "site-packages", "dist-packages"),
    *("idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3"),
)
"""Folders of the standard library that are left out."""
WHEELS_EXPECT = (
    *("libstdc++.so.6", "libgcc_s.so.1", "libz.so.1", "libexpat.so.1", "libm.so.6", "libdl.so.2"),
    *("librt.so.1", "libutil.so.1", "libpthread.so.0", "libresolv.so.2"),
)
"""Libraries that binary wheels take for granted on any Linux, and that the interpreter itself may not need."""


def shell_entries() -> Iterator[Entry]:
    """Yield a root with busybox under all its names."""
    busybox = next(path for path in (Path("/bin/busybox"), Path("/usr/bin/busybox")) if path.exists())
    for folder in (*FOLDERS, "usr/bin", "usr/lib", "usr/lib64"):
        yield Entry(path=folder)
    yield Entry(path="tmp", mode=0o1777)
    for name in ("bin", "lib", "lib64"):
        yield Entry(path=name, link=f"usr/{name}")
    yield Entry(path="sbin", link="usr/bin")
    yield Entry(path="var/run", link="../run")
    yield Entry(path="var/tmp", link="../tmp")
    yield Entry(path="etc/passwd", data=PASSWD.encode(), mode=0o644)
    yield Entry(path="etc/group", data=GROUP.encode(), mode=0o644)
    yield Entry(path="etc/nsswitch.conf", data=b"hosts: files dns\n", mode=0o644)
    yield Entry(path="usr/bin/busybox", source=busybox.resolve())
    for applet in run([busybox, "--list"]).split():
        if applet != "busybox":
            yield Entry(path=f"usr/bin/{applet}", link="busybox")


def python_entries() -> Iterator[Entry]:
    """Yield the interpreter and its standard library, with sources, below /usr/local, and the libraries they need."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    interpreter = Path(sys.base_prefix, "bin", version)
    standard_library = Path(sysconfig.get_path("stdlib"))
    for folder in ("usr/local", "usr/local/bin", "usr/local/lib"):
        yield Entry(path=folder)
    yield Entry(path=f"usr/local/bin/{version}", source=interpreter.resolve())
    for name in ("python", "python3"):
        yield Entry(path=f"usr/local/bin/{name}", link=version)
    yield from tree(standard_library, f"usr/local/lib/{version}", skip=NOT_IN_A_POD)
    yield Entry(path=f"usr/local/lib/{version}/site-packages")
    extensions = [
        path for path in (standard_library / "lib-dynload").glob("*.so") if "_tkinter" not in path.name
    ]
    yield from library_entries(shared_libraries([interpreter, *extensions]))
    for bundle in CERTIFICATES:
        if bundle.exists():
            for folder in ("etc/ssl", "etc/ssl/certs"):
                yield Entry(path=folder)
            yield Entry(path="etc/ssl/certs/ca-certificates.crt", source=bundle.resolve(), mode=0o644)
            return


def shared_libraries(programs: Iterable[Path]) -> set[Path]:
    """Return the libraries that the dynamic linker would load for `programs`, the linker, and what wheels expect."""
    found: set[Path] = set()
    for program in programs:
        text = run(["sh", "-c", 'ldd "$1" 2>/dev/null || true', "sh", program])
        found |= {Path(name) for name in re.findall(r"(?:=>\s+|^\s+)(/\S+)\s+\(0x", text, re.MULTILINE)}
    cached = run(["ldconfig", "-p"])
    linker = next((path.name for path in found if path.name.startswith("ld-linux")), "")
    wanted_word = "x86-64" if "x86-64" in linker else "AArch64"
    for name in (*WHEELS_EXPECT, f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"):
        match = re.search(rf"^\s*{re.escape(name)} \(.*{wanted_word}.*\) => (\S+)$", cached, re.MULTILINE)
        own = Path(sys.base_prefix, "lib", name)
        if own.exists():
            found = {path for path in found if path.name != name} | {own}
        elif match and not any(path.name == name for path in found):
            found.add(Path(match[1]))
    return found


def library_entries(libraries: Iterable[Path]) -> Iterator[Entry]:
    """Yield the libraries at the places where the image's dynamic linker looks, wherever the machine has them."""
    libraries = sorted(libraries)
    libc = next((path for path in libraries if path.name.startswith("libc.so")), Path("/lib/libc.so.6"))
    folder = _below_usr(libc.parent)
    parts = folder.split("/")
    for depth in range(2, len(parts) + 1):
        yield Entry(path="/".join(parts[:depth]))
    for path in libraries:
        where = _below_usr(path.parent) if path.name.startswith("ld-linux") else folder
        yield Entry(path=f"{where}/{path.name}", source=path.resolve())


def _below_usr(folder: Path) -> str:
    text = str(folder).lstrip("/")
    return text if text.startswith("usr/") else f"usr/{text}"
