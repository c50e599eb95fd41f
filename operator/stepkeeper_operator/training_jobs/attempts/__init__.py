"""Follow the attempts of a job: the pods of each, why it ended, and what that costs. Pure."""
