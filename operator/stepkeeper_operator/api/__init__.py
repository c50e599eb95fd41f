"""The custom resources as values: the source that the CRDs are generated from, and what every other module reads."""
