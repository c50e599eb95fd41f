"""TCP connections between the hosts of a training, authenticated by a shared secret."""
