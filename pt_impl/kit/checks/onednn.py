"""What oneDNN refuses: a build of PyTorch that does not have it."""

import torch


def check_onednn(enabled: bool) -> None:
    """Raise NotImplementedError where it is asked for and PyTorch was built without it."""
    if enabled and not torch.backends.mkldnn.is_available():
        raise NotImplementedError("this build of PyTorch has no oneDNN")
