"""The end of a process of the training: its exit code after a fence, and its last words."""
