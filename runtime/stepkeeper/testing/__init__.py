"""Be a cloud for tests of a training: `metadata_server`."""
