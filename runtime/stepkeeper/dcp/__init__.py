"""torch.distributed.checkpoint's file format, written without torch: stock torch loads what is made here."""
