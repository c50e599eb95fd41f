"""Save and restore the trainings of other libraries' trainers. Each module needs the extra of its name."""
