"""For tests of one's own: a contract suite for stores, a Cloud Storage emulator, a pod's identity. Needs pytest."""
