"""Restore steps that another writer left in a root: stock torch.distributed.checkpoint's and torch_xla's."""
