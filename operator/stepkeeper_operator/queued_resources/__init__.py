"""Reconcile QueuedResources with the Cloud TPU API: observe, decide, apply. Jobs are reconciled elsewhere."""
