"""For tests of one's own: a contract suite for stores, and a Cloud Storage emulator as a process. Needs pytest."""
