"""The MLP as torch operators: what autograd, autocast, torch.compile and CUDA graphs see of the recipes.

    fusedmlp::mlp           x, w1, b1, w2, b2 -> y, h, aux      training: h and aux are kept for the backward pass
    fusedmlp::mlp_backward  dy, x, h, aux, w1, w2 -> dx, dw1, db1, dw2, db2
    fusedmlp::mlp_inference x, w1, b1, w2, b2 -> y              nothing is kept

Shapes: x (..., in), w1 (hidden, in), b1 (hidden,) or None, w2 (out, hidden), b2 (out,) or None, y (..., out),
h (tokens, hidden), aux as :func:`fusedmlp.recipes.aux_shape`, where tokens is the product of x's leading dimensions.

Each operator has a fake kernel (shapes only), so ``torch.compile(fullgraph=True)`` takes it as one opaque node. They
are registered on a ``torch.library.Library``, whose dispatch is cheaper than ``torch.library.custom_op``'s. All
outputs are contiguous and alias nothing.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fusedmlp import recipes
from fusedmlp.recipes import Needs, Options

_library = torch.library.Library("fusedmlp", "DEF")
_HOW = "str activation, str engine, str on_unsupported, str search, str? compute_type"
_library.define(
    f"mlp(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, {_HOW}) -> (Tensor y, Tensor h, Tensor aux)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"mlp_inference(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, {_HOW}) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "mlp_backward(Tensor dy, Tensor x, Tensor h, Tensor aux, Tensor w1, Tensor w2, bool[] needs, "
    f"{_HOW}) -> (Tensor dx, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


_options = cache(Options)


def _rows(t: Tensor) -> Tensor:
    """(..., features) -> (tokens, features), contiguous."""
    return t.reshape(-1, t.shape[-1]).contiguous()


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


def _mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    out = recipes.forward(
        _rows(x), w1.contiguous(), _vector(b1), w2.contiguous(), _vector(b2), activation, _options(*how)
    )
    return out.y.view(*x.shape[:-1], w2.shape[0]), out.h, out.aux


def _mlp_inference(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str, *how: Any
) -> Tensor:
    y = recipes.inference(
        _rows(x), w1.contiguous(), _vector(b1), w2.contiguous(), _vector(b2), activation, _options(*how)
    )
    return y.view(*x.shape[:-1], w2.shape[0])


def _mlp_backward(
    dy: Tensor,
    x: Tensor,
    h: Tensor,
    aux: Tensor,
    w1: Tensor,
    w2: Tensor,
    needs: list[bool],
    activation: str,
    *how: Any,
) -> tuple[Tensor, ...]:
    grads = recipes.backward(
        _rows(dy), _rows(x), h, aux, w1.contiguous(), w2.contiguous(), Needs(*needs), activation, _options(*how)
    )
    dx = grads.x.view(x.shape) if grads.x is not None else None
    # An operator returns tensors, not None: an empty one stands for a gradient that nobody asked for.
    return tuple(x.new_empty(0) if g is None else g for g in grads._replace(x=dx))


def _vector(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


# ---------------------------------------------------------------------------------------------------------------------
# Fake kernels: shapes without data, for torch.compile


def _mlp_fake(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, hidden = x.numel() // x.shape[-1], w1.shape[0]
    return (
        x.new_empty(*x.shape[:-1], w2.shape[0]),
        x.new_empty(tokens, hidden),
        x.new_empty(recipes.aux_shape(tokens, hidden, activation)),
    )


def _mlp_inference_fake(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str, *how: Any
) -> Tensor:
    return x.new_empty(*x.shape[:-1], w2.shape[0])


def _mlp_backward_fake(
    dy: Tensor,
    x: Tensor,
    h: Tensor,
    aux: Tensor,
    w1: Tensor,
    w2: Tensor,
    needs: list[bool],
    activation: str,
    *how: Any,
) -> tuple[Tensor, ...]:
    shapes = (x.shape, w1.shape, w1.shape[:1], w2.shape, w2.shape[:1])
    return tuple(x.new_empty(shape if need else (0,)) for shape, need in zip(shapes, needs, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Autograd


# Kernels for the dispatcher's Autograd key. ``torch.library.register_autograd`` would make the same out of two
# functions, at several microseconds of host time more for each call.


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            y, h, aux = torch.ops.fusedmlp.mlp.default(*inputs)
        x, w1, _, w2, _, *ctx.how = inputs
        ctx.save_for_backward(x, h, aux, w1, w2)
        ctx.mark_non_differentiable(h, aux)
        ctx.set_materialize_grads(False)
        return y, h, aux

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, _, _ = outputs
        needs = list(ctx.needs_input_grad[:5])
        if dy is None:
            return (None,) * 10
        x, h, aux, w1, w2 = ctx.saved_tensors
        grads = torch.ops.fusedmlp.mlp_backward.default(dy, x, h, aux, w1, w2, needs, *ctx.how)
        return *(g if need else None for g, need in zip(grads, needs, strict=True)), *(None,) * 5


class _MLPBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.fusedmlp.mlp_backward.default(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "the fused MLP has no second derivative: for gradients of gradients use mlp.backend=torch (TorchMLP)"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Autocast

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def _register_autocast(name: str, device_type: str) -> None:
    """Cast floating-point tensors to autocast's dtype, as autocast does for torch's linear; leave float64 alone."""

    def kernel(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        cast = (
            a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() and a.dtype != torch.float64 else a
            for a in args
        )
        # Excluding the key keeps autocast out of the reference engine's own operations.
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return getattr(torch.ops.fusedmlp, name)(*cast)

    _library.impl(name, kernel, f"Autocast{device_type.upper()}")


for _name, _kernel, _fake in (
    ("mlp", _mlp, _mlp_fake),
    ("mlp_inference", _mlp_inference, _mlp_inference_fake),
    ("mlp_backward", _mlp_backward, _mlp_backward_fake),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedmlp::{_name}", _fake, lib=_library)
    for _device_type in ("cpu", "cuda"):
        _register_autocast(_name, _device_type)
_library.impl("mlp", lambda *inputs: _MLP.apply(*inputs), "Autograd")
_library.impl("mlp_backward", lambda *inputs: _MLPBackward.apply(*inputs), "Autograd")
