"""Read pickles that torch and numpy wrote, without running anything in them."""
