"""Collect what asks the training to save and stop: SIGTERM, a trigger file, the cloud, a directive, another rank."""
