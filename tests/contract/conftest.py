"""A Cloud Storage emulator for the session."""

from collections.abc import Iterator

import pytest

from stepcluster import binaries
from stepkeeper_testing.gcs import fake_gcs_server


@pytest.fixture(scope="session")
def gcs_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fake-gcs-server")
    with fake_gcs_server(binaries.ensure()["fake-gcs-server"], folder) as address:
        yield address
