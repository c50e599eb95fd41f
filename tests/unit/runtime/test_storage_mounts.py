"""Test which mount a folder is on, and which mounts are buckets in disguise."""

from pathlib import Path, PurePosixPath

import pytest

from stepkeeper.errors import BadUriError
from stepkeeper.storage import open as open_module
from stepkeeper.storage import open_store
from stepkeeper.storage.mounts import gcsfuse_uri, mount_of, parse_mountinfo, read_mountinfo

ROOT = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw"
GCSFUSE = (
    "60 22 0:55 / /mnt/runs rw,nosuid,nodev,relatime shared:9 master:3 - fuse.gcsfuse my-bucket rw,user_id=0"
)
GKE = "61 22 0:56 / /data rw,nosuid,nodev - fuse my_bucket.example rw,user_id=0,group_id=0,allow_other"
NFS = "62 22 0:57 / /nfs rw,relatime - nfs4 10.0.0.2:/export rw,vers=4.2"


def info(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def uri(text: str, path: str) -> str | None:
    return gcsfuse_uri(text, PurePosixPath(path))


def test_a_line_is_read_with_any_number_of_optional_fields() -> None:
    root, bucket, gke = parse_mountinfo(info(ROOT, GCSFUSE, GKE))
    assert (root.mount_point, root.fstype, root.source) == ("/", "ext4", "/dev/vda1")
    assert (bucket.number, bucket.parent, bucket.fstype, bucket.source) == (
        60,
        22,
        "fuse.gcsfuse",
        "my-bucket",
    )
    assert gke.source == "my_bucket.example"


def test_lines_that_are_no_mounts_are_left_out() -> None:
    assert (
        parse_mountinfo(
            "\n1 2\nx y 0:1 / / rw - ext4 d rw\n22 1 0:1 / / rw ext4 d rw\n22 1 0:1 / / rw - ext4\n"
        )
        == ()
    )


def test_a_bucket_is_known_by_the_type_of_its_mount() -> None:
    text = info(ROOT, GCSFUSE, NFS)
    assert uri(text, "/mnt/runs") == "gs://my-bucket"
    assert uri(text, "/mnt/runs/a/b") == "gs://my-bucket/a/b"
    assert uri(text, "/mnt/runs2") is None
    assert uri(text, "/mnt") is None
    assert uri(text, "/nfs/x") is None


def test_gkes_driver_mounts_without_a_subtype() -> None:
    assert uri(info(ROOT, GKE), "/data/llm") == "gs://my_bucket.example/llm"


@pytest.mark.parametrize("source", ["/dev/fuse", "host:/path", "s3fs#bucket", "none", "A"])
def test_other_fuse_mounts_are_none_of_ours(source: str) -> None:
    assert uri(info(ROOT, f"60 22 0:5 / /m rw - fuse {source} rw"), "/m/x") is None
    assert uri(info(ROOT, "60 22 0:5 / /m rw - fuse.juicefs bucket rw"), "/m/x") is None


def test_all_buckets_in_one_mount_name_the_bucket_as_a_folder() -> None:
    text = info(ROOT, "60 22 0:5 / /m rw - fuse.gcsfuse gcsfuse rw")
    assert uri(text, "/m/my-bucket/run") == "gs://my-bucket/run"


def test_a_bind_mount_shows_a_part_of_the_bucket() -> None:
    text = info(ROOT, GKE, "70 22 0:56 /runs/llm /work rw - fuse my_bucket.example rw")
    assert uri(text, "/work/a") == "gs://my_bucket.example/runs/llm/a"


def test_what_is_mounted_inside_or_over_a_bucket_is_what_counts() -> None:
    inside = "71 60 0:60 / /mnt/runs/local rw - tmpfs tmpfs rw"
    over = "72 60 0:61 / /mnt/runs rw - ext4 /dev/sdb rw"
    assert uri(info(ROOT, GCSFUSE, inside), "/mnt/runs/local/x") is None
    assert uri(info(ROOT, GCSFUSE, inside), "/mnt/runs/other") == "gs://my-bucket/other"
    assert uri(info(ROOT, GCSFUSE, over), "/mnt/runs/x") is None
    assert (
        uri(info(ROOT, over.replace("72 60", "72 22"), GCSFUSE.replace("60 22", "60 72")), "/mnt/runs/x")
        == "gs://my-bucket/x"
    )


def test_a_mount_over_a_folder_above_hides_the_bucket() -> None:
    above = "73 22 0:62 / /mnt rw - xfs /dev/sdc rw"
    mount = mount_of(info(ROOT, GCSFUSE, above), PurePosixPath("/mnt/runs/x"))
    assert mount is not None
    assert mount.fstype == "xfs"


def test_names_with_spaces_tabs_and_backslashes_are_octal() -> None:
    text = info(ROOT, r"60 22 0:5 /a\040b /my\040runs\011\134x rw - fuse.gcsfuse my-bucket rw")
    assert uri(text, "/my runs\t\\x/y") == "gs://my-bucket/a%20b/y"


def test_in_a_changed_root_the_first_mount_need_not_be_the_root() -> None:
    text = info(
        "60 5 0:55 / /mnt/runs rw - fuse.gcsfuse my-bucket rw", "61 60 0:9 / /mnt/runs/t rw - tmpfs t rw"
    )
    assert uri(text, "/mnt/runs/x") == "gs://my-bucket/x"
    assert uri(text, "/mnt/runs/t/x") is None
    assert uri(text, "/else") is None


def test_the_root_may_be_its_own_parent() -> None:
    text = info("1 1 0:2 / / rw - rootfs rootfs rw", GCSFUSE.replace("60 22", "60 1"))
    assert uri(text, "/mnt/runs/x") == "gs://my-bucket/x"


def test_this_process_has_a_root() -> None:
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
