"""Measure the operator under the load of many jobs, on a real API server."""
