"""`python -m text_lm`: kept apart from train.py, so that the loader's worker processes never import torch_xla."""

from text_lm.train import main

if __name__ == "__main__":
    main()
