"""The PyTorch half: families of techniques, one file each, and the kit that serves them."""
