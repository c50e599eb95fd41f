"""Write torch.distributed.checkpoint's on-disk format without torch: tensor files and `.metadata`."""
