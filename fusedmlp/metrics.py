"""What a step costs: FLOPs, the device's peak, and a clock that runs only while training does."""

import time

import torch

from fusedmlp.config import ModelConfig

# Dense peak of 16-bit matrix products in TFLOP/s, from NVIDIA's data sheets (no sparsity). A device that is not listed
# has no peak, and its utilisation is null: a guess would look like a measurement.
PEAK_TFLOPS_16BIT = {
    "NVIDIA H200": 989.4,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA L40S": 362.05,
    "NVIDIA L4": 121.0,
    "NVIDIA A10": 125.0,
    "Tesla V100-SXM2-16GB": 125.0,
    "Tesla V100-SXM2-32GB": 125.0,
    "Tesla T4": 65.0,
}


def flops_per_token(config: ModelConfig, vocab_size: int) -> int:
    """Model FLOPs of one training token, forward and backward: 6 for each weight in a matrix, and attention's own.

    Attention adds 12 d_model T for each layer (QKᵀ and its product with V, 2 FLOPs a multiply-add, backward twice the
    forward pass), without a discount for the causal mask, as in the PaLM paper's appendix B. Embedding look-ups cost
    nothing; the tied head is a matrix product. The same for both arms.
    """
    c = config
    matrices = c.n_layer * (4 * c.d_model**2 + 2 * c.d_model * c.hidden) + vocab_size * c.d_model
    return 6 * matrices + 12 * c.n_layer * c.d_model * c.block_size


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of ``device`` in ``dtype``, or None where it is not known."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    peak = PEAK_TFLOPS_16BIT.get(torch.cuda.get_device_name(device))
    if dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        return None  # Volta and Turing emulate bf16
    return peak * 1e12 if peak is not None else None


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory in GiB: what torch allocated on a GPU, or the resident set of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes on macOS, KiB on Linux


class TrainingClock:
    """Wall time spent in training since it was last read: evaluation, saving, sampling and probes are left out.

    GPU work is asynchronous, so the caller synchronises before :meth:`lap` and before :meth:`pause`.
    """

    def __init__(self) -> None:
        self._elapsed, self._since = 0.0, time.perf_counter()

    def pause(self) -> None:
        """Stop; what follows does not count."""
        self._elapsed += time.perf_counter() - self._since

    def go_on(self) -> None:
        """Run again."""
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap, while running; starts a new one."""
        now = time.perf_counter()
        seconds, self._elapsed, self._since = self._elapsed + now - self._since, 0.0, now
        return seconds
