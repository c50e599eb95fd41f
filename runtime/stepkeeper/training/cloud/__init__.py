"""Watch the cloud's announcements for this machine: preemption and maintenance."""
