"""Follow the attempts of a job: which pods are whose, why each ended, and what that costs. Pure."""
