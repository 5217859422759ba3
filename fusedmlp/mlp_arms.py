"""The arms of ``bench=mlp``: everybody who can compute the same MLP, forward and backward, and how each is built.

    fused               FusedMLP, this project
    eager               TorchMLP: linear, activation, linear
    compile             the same under torch.compile
    max-autotune        the same, mode max-autotune-no-cudagraphs: every arm is captured here anyway
    addmm_activation    torch._addmm_activation and addmm: cuBLASLt's epilog through torch's private door, no backward
    gemm_floor          the plain GEMMs alone, into memory that is already there: no MLP can be faster than those
    transformer_engine  LayerNormMLP, the only MLP it has: it computes a LayerNorm more than the others
    flash_attn          flash_attn.ops.fused_dense.FusedMLP
    apex                apex.fused_dense.FusedDenseGeluDense, GELU only

The last three take part where they can be imported; nothing here needs them.

Letters: T tokens, D width, H = 4 D hidden. x, y, dx, dy (T, D), w1 (H, D), w2 (D, H).
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedmlp.mlp import FusedMLP, TorchMLP, activate
from fusedmlp.recipes import Options
from fusedmlp.timing import Step, Unavailable, relative_errors, require

HIDDEN = 4  # hidden layers are this many times as wide
RESULTS = ("y", "dx", "dW1", "db1", "dW2", "db2")
TORCH_ARMS = ("eager", "compile", "max-autotune", "addmm_activation")
NORM_ARMS = ("transformer_engine",)
ROUNDING_LIMIT = 1e-2  # for compute types that round the operands, or the accumulator, further than eager torch does


def step(
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
    parameters: list[Tensor],
    dy: Tensor | None,
    extra: tuple[Tensor, ...] = (),
) -> Step:
    """One training step, y and the gradients of ``x`` and ``parameters``; or inference, where there is no ``dy``.

    The gradients of ``extra`` are computed, too, but not returned.
    """
    inputs = [x, *parameters]

    def training() -> tuple[Tensor, ...]:
        y = forward(x)
        grads = torch.autograd.grad(y, [*inputs, *extra], dy)
        return (y.detach(), *grads[: len(inputs)])

    @torch.no_grad()
    def inference() -> tuple[Tensor, ...]:
        return (forward(x),)

    return inference if dy is None else training


@dataclass
class Problem:
    """One MLP with its input and upstream gradient, all random; eager torch and float64 say what is right."""

    tokens: int
    width: int
    activation: str
    dtype: torch.dtype
    device: torch.device
    training: bool
    seed: int
    options: Options

    def __post_init__(self) -> None:
        """Draw the operands."""
        torch.manual_seed(self.seed)
        how: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        self.eager = self.place(TorchMLP(self.width, HIDDEN * self.width, self.activation))
        self.x = torch.randn(self.tokens, self.width, **how).requires_grad_(self.training)
        self.dy = torch.randn(self.tokens, self.width, **how)

    def place(self, mlp: nn.Module) -> nn.Module:
        """Move ``mlp`` where the problem is."""
        return mlp.to(self.device, self.dtype).requires_grad_(self.training)

    @property
    def flops(self) -> int:
        """FLOPs of the GEMMs: two for each multiply-add, two GEMMs forward and four backward."""
        return 2 * self.tokens * HIDDEN * self.width**2 * (6 if self.training else 2)

    def step(
        self, forward: Callable[[Tensor], Tensor], parameters: list[Tensor], extra: tuple[Tensor, ...] = ()
    ) -> Step:
        """:func:`step` on this problem's operands."""
        return step(forward, self.x, parameters, self.dy if self.training else None, extra)

    @cached_property
    def _right(self) -> dict[bool, tuple[tuple[Tensor, ...], list[float]]]:
        return {}

    def right(self, norm: bool) -> tuple[tuple[Tensor, ...], list[float]]:
        """The results in float64, and the relative errors of eager torch; with a LayerNorm in front or without."""
        if norm not in self._right:
            exact = TorchMLP(self.width, HIDDEN * self.width, self.activation)
            exact.load_state_dict(self.eager.state_dict())
            exact.to(self.device, torch.float64)
            x = self.x.detach().double().requires_grad_(self.training)
            dy = self.dy.double() if self.training else None

            def behind_norm(mlp: nn.Module) -> Callable[[Tensor], Tensor]:
                return lambda x: mlp(F.layer_norm(x, (self.width,)) if norm else x)

            reference = step(behind_norm(exact), x, list(exact.parameters()), dy)()
            torch_results = self.step(behind_norm(self.eager), list(self.eager.parameters()))()
            self._right[norm] = reference, relative_errors(torch_results, reference)
        return self._right[norm]

    def errors(self, arm: str, results: tuple[Tensor, ...]) -> list[float]:
        """Relative errors against float64 of an arm's results; raises :class:`Wrong` above :meth:`limits`."""
        reference, torch_errors = self.right(arm in NORM_ARMS)
        errors = relative_errors(results, reference)
        require(RESULTS[: len(reference)], errors, self.limits(torch_errors))
        return errors

    def limits(self, torch_errors: list[float]) -> list[float]:
        """The largest errors taken for right: twice those of eager torch in the same dtype, and a rounding."""
        floor = torch.finfo(self.dtype).eps
        if self.options.compute_type not in (None, "COMPUTE_32F", "COMPUTE_32F_PEDANTIC"):
            floor = max(floor, ROUNDING_LIMIT)
        return [2 * e + floor for e in torch_errors]


def fused(p: Problem) -> Step:
    """FusedMLP."""
    mlp = FusedMLP(p.width, HIDDEN * p.width, p.activation, options=p.options)
    mlp.load_state_dict(p.eager.state_dict())
    p.place(mlp)
    return p.step(mlp, list(mlp.parameters()))


def eager(p: Problem) -> Step:
    """TorchMLP."""
    return p.step(p.eager, list(p.eager.parameters()))


def compiled(p: Problem) -> Step:
    """torch.compile, with its defaults."""
    return p.step(torch.compile(p.eager, dynamic=False), list(p.eager.parameters()))


def max_autotune(p: Problem) -> Step:
    """torch.compile with a search over Triton's and cuBLAS's GEMMs; compiling takes up to minutes."""
    mlp = torch.compile(p.eager, dynamic=False, mode="max-autotune-no-cudagraphs")
    return p.step(mlp, list(p.eager.parameters()))


def addmm_activation(p: Problem) -> Step:
    """torch's private operator with bias and activation."""
    if p.training:
        raise Unavailable("torch._addmm_activation has no backward pass")
    if p.activation == "gelu" and not _gelu_is_tanh(p):
        raise Unavailable(f"the GELU of torch._addmm_activation is not the tanh form on {p.device.type}")
    w1, b1, w2, b2 = p.eager.parameters()

    def forward(x: Tensor) -> Tensor:
        h = torch._addmm_activation(b1, x, w1.T, use_gelu=p.activation == "gelu")
        return torch.addmm(b2, h, w2.T)

    return p.step(forward, [])


def _gelu_is_tanh(p: Problem) -> bool:
    """Ask where GELU's two forms differ most, by 1% and more: a product of zeros, and z as the bias."""
    z = torch.linspace(-4, -2, 64, device=p.device, dtype=p.dtype)
    zeros = z.new_zeros(16, 16), z.new_zeros(16, 64)
    got = torch._addmm_activation(z, *zeros, use_gelu=True)[0].double()
    tanh, erf = (F.gelu(z.double(), approximate=form) for form in ("tanh", "none"))
    return bool((got - tanh).norm() < (got - erf).norm())


def gemm_floor(p: Problem) -> Step:
    """The GEMMs alone, on the data that the MLP would give them (what a GEMM reads changes its power and speed)."""
    w1, b1, w2, _ = p.eager.parameters()
    z = F.linear(p.x.detach(), w1, b1).detach().requires_grad_(p.training)
    h = activate(z, p.activation)
    x, dy, hidden = p.x.detach(), p.dy, h.detach()
    first, second = w1.detach(), w2.detach()
    products = [(x, first.T), (hidden, second.T)]  # fc1, fc2
    if p.training:
        (dz,) = torch.autograd.grad(h, z, dy @ second)
        products += [(dy.T, hidden), (dy, second), (dz.T, x), (dz, first)]  # dW2, dH, dW1, dx
    outputs = tuple(a.new_empty(a.shape[0], b.shape[1]) for a, b in products)

    def step() -> tuple[Tensor, ...]:
        for (a, b), out in zip(products, outputs, strict=True):
            torch.mm(a, b, out=out)
        return outputs

    return step


def transformer_engine(p: Problem) -> Step:
    """LayerNormMLP; the gradients of its norm are computed too."""
    te = _import("transformer_engine.pytorch", p)
    mlp = te.LayerNormMLP(
        p.width, HIDDEN * p.width, eps=1e-5, activation=p.activation, params_dtype=p.dtype, device=p.device
    )
    parameters = [mlp.fc1_weight, mlp.fc1_bias, mlp.fc2_weight, mlp.fc2_bias]
    _copy(p, mlp, parameters)
    return p.step(mlp, parameters, (mlp.layer_norm_weight, mlp.layer_norm_bias))


def flash_attn(p: Problem) -> Step:
    """FusedMLP of flash-attention, by its own heuristic (which leaves GELU unfused on Hopper)."""
    module = _import("flash_attn.ops.fused_dense", p)
    name = "gelu_approx" if p.activation == "gelu" else "relu"
    mlp = module.FusedMLP(p.width, HIDDEN * p.width, activation=name, device=p.device, dtype=p.dtype)
    parameters = [mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias]
    _copy(p, mlp, parameters)
    return p.step(mlp, parameters)


def apex(p: Problem) -> Step:
    """FusedDenseGeluDense."""
    module = _import("apex.fused_dense", p)
    if p.activation != "gelu":
        raise Unavailable("apex.fused_dense has GELU only")
    mlp = module.FusedDenseGeluDense(p.width, HIDDEN * p.width, p.width)
    parameters = [mlp.weight1, mlp.bias1, mlp.weight2, mlp.bias2]
    p.place(mlp)
    _copy(p, mlp, parameters)
    return p.step(mlp, parameters)


def _import(name: str, p: Problem) -> Any:
    if p.device.type != "cuda":
        raise Unavailable("needs a CUDA device")
    try:
        return importlib.import_module(name)
    except Exception as error:  # built for another torch or CUDA, such a package fails in its own ways
        raise Unavailable(f"{name} cannot be imported: {type(error).__name__}: {str(error)[:200]}") from error


@torch.no_grad()
def _copy(p: Problem, mlp: nn.Module, parameters: list[Tensor]) -> None:
    """Give ``mlp`` the problem's weights."""
    for to, origin in zip(parameters, p.eager.parameters(), strict=True):
        to.copy_(origin)
    mlp.requires_grad_(p.training)


ARMS: dict[str, Callable[[Problem], Step]] = {
    "fused": fused,
    "eager": eager,
    "compile": compiled,
    "max-autotune": max_autotune,
    "addmm_activation": addmm_activation,
    "gemm_floor": gemm_floor,
    "transformer_engine": transformer_engine,
    "flash_attn": flash_attn,
    "apex": apex,
}
