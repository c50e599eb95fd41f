"""Which mount a folder is on, and which mounts are buckets in disguise."""

from pathlib import Path, PurePosixPath

import pytest

from stepkeeper.errors import BadUriError
from stepkeeper.storage import open as open_module
from stepkeeper.storage import open_store
from stepkeeper.storage.mounts import gcsfuse_uri, mount_of, read_mountinfo

ROOT = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw"
GCSFUSE = "60 22 0:55 / /mnt/runs rw,nosuid,nodev shared:9 master:3 - fuse.gcsfuse my-bucket rw,user_id=0"
GKE = "61 22 0:56 / /data rw,nosuid,nodev - fuse my_bucket.example rw,user_id=0,group_id=0,allow_other"
NFS = "62 22 0:57 / /nfs rw,relatime - nfs4 10.0.0.2:/export rw,vers=4.2"
INSIDE = "71 60 0:60 / /mnt/runs/local rw - tmpfs tmpfs rw"
OVER = "72 60 0:61 / /mnt/runs rw - ext4 /dev/sdb rw"
BIND = "70 22 0:56 /runs/llm /work rw - fuse my_bucket.example rw"
SPACES = r"60 22 0:5 /a\040b /my\040runs\011\134x rw - fuse.gcsfuse my-bucket rw"
NO_MOUNTS = ["1 2", "22 1 0:1 / / rw ext4 d rw", "22 1 0:1 / / rw - ext4"]
ABOVE = "73 22 0:62 / /mnt rw - xfs /dev/sdc rw"


def info(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def of_fuse(kind: str, source: str) -> list[str]:
    return [ROOT, f"60 22 0:5 / /m rw - {kind} {source} rw"]


@pytest.mark.parametrize(
    ("lines", "path", "uri"),
    [
        pytest.param([ROOT, GCSFUSE, NFS], "/mnt/runs", "gs://my-bucket", id="a bucket"),
        pytest.param([ROOT, GCSFUSE, NFS], "/mnt/runs/a/b", "gs://my-bucket/a/b", id="a folder of it"),
        pytest.param([ROOT, GCSFUSE, NFS], "/mnt/runs2", None, id="another folder"),
        pytest.param([ROOT, GCSFUSE, NFS], "/mnt", None, id="the folder above"),
        pytest.param([ROOT, GCSFUSE, NFS], "/nfs/x", None, id="NFS"),
        pytest.param([*NO_MOUNTS, ROOT, GCSFUSE], "/mnt/runs", "gs://my-bucket", id="lines without sense"),
        pytest.param([ROOT, GKE], "/data/llm", "gs://my_bucket.example/llm", id="GKE's, without a subtype"),
        *(pytest.param(of_fuse("fuse", s), "/m/x", None, id=s) for s in ("/dev/fuse", "h:/p", "s3fs#b", "A")),
        pytest.param(of_fuse("fuse.juicefs", "bucket"), "/m/x", None, id="juicefs"),
        pytest.param(
            of_fuse("fuse.gcsfuse", "gcsfuse"), "/m/b-1/run", "gs://b-1/run", id="all buckets in one"
        ),
        pytest.param([ROOT, GKE, BIND], "/work/a", "gs://my_bucket.example/runs/llm/a", id="a bind mount"),
        pytest.param([ROOT, GCSFUSE, INSIDE], "/mnt/runs/local/x", None, id="a mount inside"),
        pytest.param([ROOT, GCSFUSE, INSIDE], "/mnt/runs/b", "gs://my-bucket/b", id="beside a mount inside"),
        pytest.param([ROOT, GCSFUSE, OVER], "/mnt/runs/x", None, id="a mount over it"),
        pytest.param([ROOT, GCSFUSE, ABOVE], "/mnt/runs/x", None, id="a mount over the folder above"),
        pytest.param([ROOT, SPACES], "/my runs\t\\x/y", "gs://my-bucket/a%20b/y", id="octal names"),
    ],
)
def test_a_bucket_is_known_by_its_mount(lines: list[str], path: str, uri: str | None) -> None:
    assert gcsfuse_uri(info(*lines), PurePosixPath(path)) == uri


def test_the_mounts_of_this_process_are_read() -> None:
    assert mount_of(read_mountinfo(), PurePosixPath("/")) is not None


def test_a_folder_on_a_mounted_bucket_is_refused_with_the_uri_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "bucket")
    line = f"60 22 0:55 / {tmp_path}/bucket rw - fuse.gcsfuse my-bucket rw"
    monkeypatch.setattr(open_module, "read_mountinfo", lambda: info(ROOT, line))
    for folder in ("bucket/run", "link/run"):
        with pytest.raises(BadUriError, match="write 'gs://my-bucket/run'"):
            open_store((tmp_path / folder).as_uri())
    open_store((tmp_path / "other").as_uri())
