"""Decide what to do for one QueuedResource. Pure: nothing here asks the cloud or the cluster."""
