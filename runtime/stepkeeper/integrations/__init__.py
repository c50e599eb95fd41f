"""Save and restore the trainings of other libraries' trainers. Each module needs its library, and the extra of its name."""
