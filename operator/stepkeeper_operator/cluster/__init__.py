"""Send requests to the Kubernetes API with plain JSON objects and the operator's own errors."""
