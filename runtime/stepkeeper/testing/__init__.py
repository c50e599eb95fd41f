"""Help users write tests: a suite for stores (needs pytest), a bucket's emulator, a pod's identity, checkpoints."""
