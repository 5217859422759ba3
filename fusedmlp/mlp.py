"""The two-layer perceptron of a transformer block, in two arms with one set of parameters.

:class:`TorchMLP` is the baseline: two ``nn.Linear`` with an activation between. :class:`FusedMLP` computes the same
with GEMMs that carry bias and activation in their epilogs. Parameter names, initialisation and ``state_dict`` are
identical, so a checkpoint of either loads into the other.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedmlp import ops  # noqa: F401  (registers torch.ops.fusedmlp)
from fusedmlp.recipes import ACTIVATIONS, Options

_DEFAULT = Options()


def activate(z: Tensor, activation: str) -> Tensor:
    """``gelu`` in the tanh approximation (the one that cuBLASLt computes), or ``relu``."""
    return F.gelu(z, approximate="tanh") if activation == "gelu" else F.relu(z)


def fused_mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    activation: str = "gelu",
    options: Options = _DEFAULT,
) -> Tensor:
    """``fc2(activation(fc1(x)))`` with fused epilogs; differentiable once.

    Args:
        x: (..., in), any strides; all tensors share one dtype and device (under autocast: one device).
        fc1_weight: (hidden, in).
        fc1_bias: (hidden,) or None.
        fc2_weight: (out, hidden).
        fc2_bias: (out,) or None.
        activation: ``gelu`` (tanh approximation) or ``relu``.
        options: which engine executes, and what happens where it cannot.

    Returns:
        (..., out)

    Raises:
        ValueError: shapes, dtypes or the activation do not fit together.
        fusedmlp.plans.Unsupported: with ``on_unsupported="error"``, naming the constraint that was broken.
    """
    _check(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, activation)
    inputs = (
        *(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias),
        *(activation, options.engine, options.on_unsupported, options.search, options.compute_type),
    )
    if torch.is_grad_enabled() and (
        x.requires_grad
        or fc1_weight.requires_grad
        or fc2_weight.requires_grad
        or (fc1_bias is not None and fc1_bias.requires_grad)
        or (fc2_bias is not None and fc2_bias.requires_grad)
    ):
        return torch.ops.fusedmlp.mlp.default(*inputs)[0]
    return torch.ops.fusedmlp.mlp_inference.default(*inputs)


def _check(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if w1.ndim != 2 or w2.ndim != 2 or x.ndim < 1 or x.shape[-1] != w1.shape[1] or w2.shape[1] != w1.shape[0]:
        raise ValueError(
            f"x {tuple(x.shape)}, fc1_weight {tuple(w1.shape)} and fc2_weight {tuple(w2.shape)} do not fit: "
            "expected (..., in), (hidden, in), (out, hidden)"
        )
    for name, bias, weight in (("fc1_bias", b1, w1), ("fc2_bias", b2, w2)):
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"{name} has shape {tuple(bias.shape)}, expected ({weight.shape[0]},)")
    dtype, device = x.dtype, x.device
    for t in (w1, b1, w2, b2):
        if t is None:
            continue
        if t.device != device:
            raise ValueError(f"tensors on different devices: {device} and {t.device}")
        if t.dtype != dtype and not torch.is_autocast_enabled(device.type):
            raise ValueError(f"tensors of different dtypes outside autocast: {dtype} and {t.dtype}")


class TorchMLP(nn.Module):
    """``fc2(activation(fc1(x)))`` with torch's own kernels.

    Args:
        d_model: features in and out.
        d_hidden: features between.
        activation: ``gelu`` (tanh approximation) or ``relu``.
        bias: give both layers a bias.
    """

    def __init__(self, d_model: int, d_hidden: int, activation: str = "gelu", bias: bool = True) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        self.activation = activation
        self.fc1 = nn.Linear(d_model, d_hidden, bias=bias)
        self.fc2 = nn.Linear(d_hidden, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model)."""
        return self.fc2(activate(self.fc1(x), self.activation))


class FusedMLP(TorchMLP):
    """The same function of the same parameters, computed by :func:`fused_mlp`.

    Args:
        d_model, d_hidden, activation, bias: as for :class:`TorchMLP`.
        options: which engine executes, and what happens where it cannot.
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        activation: str = "gelu",
        bias: bool = True,
        options: Options = _DEFAULT,
    ) -> None:
        super().__init__(d_model, d_hidden, activation, bias)
        self.options = options
        self.as_torch = False

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model)."""
        if self.as_torch:
            return super().forward(x)
        return fused_mlp(
            x,
            self.fc1.weight,
            self.fc1.bias,
            self.fc2.weight,
            self.fc2.bias,
            activation=self.activation,
            options=self.options,
        )


@contextmanager
def torch_mlps(model: nn.Module) -> Iterator[None]:
    """Within this context every :class:`FusedMLP` in ``model`` computes as :class:`TorchMLP` does."""
    fused = [m for m in model.modules() if isinstance(m, FusedMLP)]
    for m in fused:
        m.as_torch = True
    try:
        yield
    finally:
        for m in fused:
            m.as_torch = False
