"""Let the ranks of one training talk to each other, agree on a step, and prove that they see one root."""
