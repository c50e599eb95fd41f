"""Serve the HTTPS endpoint that pods report to."""
