"""Build the manifests of a job's objects. Pure: nothing here reads a clock or a cluster."""
