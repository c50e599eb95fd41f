"""OCI image archives without a registry or container engine: tar files, the same bytes for the same content."""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
EPOCH_S = 315532800
"""Every file's time, 1980: the earliest that a zip file can hold, in case somebody makes one in a container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing in a layer: a file with a source or data, a link, or, with neither, a folder."""

    path: str
    """Relative to the root, without a leading slash."""
    source: Path | None = None
    data: bytes | None = None
    link: str | None = None
    mode: int = 0o755


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    path: Path
    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    environment: Mapping[str, str] = field(default_factory=dict)
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    user: str = "0:0"
    folder: str = "/"


def write_layer(path: Path, entries: Iterable[Entry]) -> Layer:
    """Write the layer to `path`, its entries sorted, owned by root, and with one time."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for entry in sorted(entries, key=lambda entry: entry.path):
            _add(tar, entry)
    return read_layer(path)


def read_layer(path: Path) -> Layer:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return Layer(path=path, digest=f"sha256:{digest.hexdigest()}", size_bytes=path.stat().st_size)


def tree(source: Path, target: str, *, skip: Iterable[str] = ("__pycache__",)) -> Iterable[Entry]:
    """Entries for everything below `source`, placed below `target`; names in `skip` are left out wherever they are."""
    left_out = set(skip)
    yield Entry(path=target)
    for path in source.rglob("*"):
        relative = path.relative_to(source)
        if left_out.intersection(relative.parts):
            continue
        name = f"{target}/{relative}"
        if path.is_symlink():
            yield Entry(path=name, link=str(path.readlink()))
        elif path.is_dir():
            yield Entry(path=name)
        else:
            yield Entry(path=name, source=path, mode=0o755 if path.stat().st_mode & 0o100 else 0o644)


def image_config(layers: Sequence[Layer], settings: Settings) -> dict[str, object]:
    """Return the image's configuration, as OCI's image specification defines it."""
    config: dict[str, object] = {
        "Env": [f"{key}={value}" for key, value in settings.environment.items()],
        "User": settings.user,
        "WorkingDir": settings.folder,
    }
    if settings.entrypoint:
        config["Entrypoint"] = list(settings.entrypoint)
    if settings.command:
        config["Cmd"] = list(settings.command)
    return {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "created": "1980-01-01T00:00:00Z",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        "history": [{"created_by": "stepcluster"} for _ in layers],
    }


def image_manifest(config: bytes, layers: Sequence[Layer]) -> dict[str, object]:
    return {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": _descriptor(CONFIG_TYPE, config),
        "layers": [
            {"mediaType": LAYER_TYPE, "digest": layer.digest, "size": layer.size_bytes} for layer in layers
        ],
    }


def full_name(name: str) -> str:
    """Return an image's name as nodes look it up, which take a name without a registry for one of docker.io."""
    registry, slash, _ = name.partition("/")
    if slash and ("." in registry or ":" in registry or registry == "localhost"):
        return name
    return f"docker.io/{name}" if slash else f"docker.io/library/{name}"


def image_index(manifest: bytes, name: str) -> dict[str, object]:
    """Return the archive's index: one manifest, under the name that a pod's `image` gives."""
    annotations = {
        "io.containerd.image.name": full_name(name),
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }
    return {
        "schemaVersion": 2,
        "manifests": [{**_descriptor(MANIFEST_TYPE, manifest), "annotations": annotations}],
    }


def write_image(path: Path, name: str, layers: Sequence[Layer], settings: Settings) -> None:
    config = _json(image_config(layers, settings))
    manifest = _json(image_manifest(config, layers))
    with tarfile.open(path, "w") as tar:
        _add(tar, Entry(path="oci-layout", data=_json({"imageLayoutVersion": "1.0.0"}), mode=0o644))
        _add(tar, Entry(path="index.json", data=_json(image_index(manifest, name)), mode=0o644))
        for blob in (config, manifest):
            _add(tar, Entry(path=_blob_path(_digest(blob)), data=blob, mode=0o644))
        for layer in {layer.digest: layer for layer in layers}.values():
            _add(tar, Entry(path=_blob_path(layer.digest), source=layer.path, mode=0o644))


def _add(tar: tarfile.TarFile, entry: Entry) -> None:
    info = tarfile.TarInfo(entry.path)
    info.mtime, info.mode = EPOCH_S, entry.mode
    if entry.link is not None:
        info.type, info.linkname = tarfile.SYMTYPE, entry.link
        tar.addfile(info)
    elif entry.source is not None:
        info.size = entry.source.stat().st_size
        with entry.source.open("rb") as file:
            tar.addfile(info, file)
    elif entry.data is not None:
        info.size = len(entry.data)
        tar.addfile(info, io.BytesIO(entry.data))
    else:
        info.type = tarfile.DIRTYPE
        tar.addfile(info)


def _descriptor(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _blob_path(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
