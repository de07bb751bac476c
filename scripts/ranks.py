"""Which device a rank of a program started by torchrun runs on."""

import os

import torch


def device_of_rank(device: str | None = None) -> torch.device:
    """This rank's device, made current if it is a GPU.

    Args:
        device: "cuda" or "cpu"; None: cuda where this host has a GPU for each of its ranks, else cpu. All ranks of a
            host decide alike.

    Raises:
        ValueError: `device` is neither, or "cuda" with fewer GPUs than ranks: two ranks of NCCL cannot share one.
    """
    if device not in ("cuda", "cpu", None):
        raise ValueError(f"device must be 'cuda', 'cpu' or None, got {device!r}")
    rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    if device == "cpu" or (device is None and gpus < ranks):
        return torch.device("cpu")
    if gpus < ranks:
        raise ValueError(f"device must be 'cpu' where {ranks} ranks have {gpus} GPUs, got 'cuda'")
    chosen = torch.device("cuda", rank)
    torch.cuda.set_device(chosen)
    return chosen
