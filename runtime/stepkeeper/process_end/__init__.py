"""Things that a process of the training leaves behind at its end: its exit code after a fence, and its last words."""
