"""TCP connections between the hosts of a training, which only its ranks can make."""
