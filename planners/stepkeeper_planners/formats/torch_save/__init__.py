"""Read and write torch.save files, without running anything in them."""
