"""Any folder, by its path or its URI, as a store."""

from pathlib import Path

import pytest

from stepkeeper.dcp.folder import folder_uri, open_folder
from stepkeeper.errors import BadUriError
from stepkeeper.storage.base import StreamedStore


def test_paths_and_uris_name_folders() -> None:
    assert folder_uri("/a b/c") == "file:///a%20b/c"
    assert folder_uri(Path("/a")) == "file:///a"
    assert folder_uri("a/b") == (Path.cwd() / "a/b").as_uri()
    assert folder_uri("gs://bucket/a/") == "gs://bucket/a"
    for wrong in ("", "local:///a", "gs://", Path("gs://bucket/a")):
        with pytest.raises(BadUriError):
            open_folder(wrong)


def test_only_the_folder_is_reached_and_messages_say_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "my run").mkdir()
    with open_folder(tmp_path / "my run") as folder:
        path = folder.path("object")
        assert (
            f"{folder.uri}/{path}" == f"{folder.own_uri}/object" == (tmp_path / "my run" / "object").as_uri()
        )
        folder.write(path, [b"some ", b"bytes"])
        assert (tmp_path / "my run" / "object").read_bytes() == b"some bytes"
        assert folder.read(path, 5) == b"bytes"
        assert not folder.put_if_absent(path, b"other")
        assert [stat.path for stat in folder.list(folder.path(""))] == [path]
        folder.delete(path)
        assert folder.list(folder.path("")) == []
        for other in ("object", "other/object", ""):
            with pytest.raises(ValueError, match="isn't in"):
                folder.read(other)
        assert not isinstance(folder, StreamedStore)
