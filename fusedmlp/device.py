"""Which device and which precision a config means on this machine."""

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from fusedmlp.config import MLPConfig, ParallelConfig
from fusedmlp.plans import Unsupported, check_compute_type
from fusedmlp.schema import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is a GPU, else the CPU.

    Raises:
        ConfigError: a CUDA device that this machine does not have.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        raise ConfigError(f"device={name}: {why}; use device=cpu or device=auto")
    device = torch.device(name if ":" in name else f"cuda:{torch.cuda.current_device()}")
    if device.index >= torch.cuda.device_count():
        raise ConfigError(f"device={name}: there are {torch.cuda.device_count()} GPUs, counted from 0")
    return device


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the matrix products; ``auto`` is bf16 on CUDA and fp32 on the CPU."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "fp32"
    return DTYPES[name]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Mixed precision for ``dtype``: fp32 needs none."""
    if dtype is torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def set_fp32_math(mlp: MLPConfig, dtype: torch.dtype) -> None:
    """Let torch's own fp32 products round as ``mlp.compute_type`` does, so that a comparison of the arms is fair.

    Raises:
        ConfigError: the compute type does not take ``dtype``.
    """
    try:
        check_compute_type(mlp.compute_type, dtype)
    except Unsupported as refusal:
        raise ConfigError(f"mlp.compute_type: {refusal}") from None
    torch.backends.cuda.matmul.allow_tf32 = mlp.compute_type == "COMPUTE_32F_FAST_TF32"


def require_one_process(parallel: ParallelConfig) -> None:
    """Refuse to start as one of several processes, which would share one run directory.

    Raises:
        ConfigError: the launcher started more than one.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise ConfigError(
            f"WORLD_SIZE={world}: this version trains in one process (parallel.strategy={parallel.strategy}); "
            "start it without torchrun, or with --nproc-per-node=1"
        )
