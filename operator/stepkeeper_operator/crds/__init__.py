"""Generate the CRDs from the types: `python -m stepkeeper_operator.crds`."""
