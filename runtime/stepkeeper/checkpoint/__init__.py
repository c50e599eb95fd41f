"""Write a checkpoint's objects on each rank, finish them on rank 0, and read them back verified."""
