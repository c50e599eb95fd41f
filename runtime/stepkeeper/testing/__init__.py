"""For tests of one's own: a suite for stores (needs pytest), a bucket's emulator, a pod's identity, checkpoints."""
