"""fusedmlp: a small GPT whose MLP blocks run on cuBLASLt GEMMs with fused epilogs.

The names below are imported on first use, so that ``import fusedmlp`` and the validation of a config stay fast and
need no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "fused_mlp": "fusedmlp.mlp",
    "FusedMLP": "fusedmlp.mlp",
    "TorchMLP": "fusedmlp.mlp",
    "GPT": "fusedmlp.model",
}
__all__ = ["GPT", "FusedMLP", "TorchMLP", "fused_mlp"]


def __getattr__(name: str) -> Any:
    """Import a public name from its room on first use (PEP 562)."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'fusedmlp' has no attribute {name!r}")
