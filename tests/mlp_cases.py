"""One MLP problem in two computations, for the tests on CPU and on GPU: what was asked, and float64 torch's answer."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedmlp.mlp import TorchMLP, fused_mlp
from fusedmlp.recipes import Options

NAMES = ("y", "dx", "dW1", "db1", "dW2", "db2")


@dataclass
class Case:
    x: Tensor
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    dy: Tensor
    activation: str

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.x, self.w1, self.b1, self.w2, self.b2

    def to(self, dtype: torch.dtype) -> "Case":
        moved = [t if t is None else t.detach().to(dtype) for t in (*self.tensors, self.dy)]
        return Case(*moved, self.activation)


def make_case(
    tokens=(5, 7),
    width=24,
    hidden=40,
    out=None,
    activation="gelu",
    bias1=True,
    bias2=True,
    dtype=torch.float32,
    device="cpu",
    seed=0,
) -> Case:
    """Random weights, biases, inputs and upstream gradient (never ones, which would hide indexing errors)."""
    g = torch.Generator().manual_seed(seed)
    out = width if out is None else out

    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(dtype).to(device)

    return Case(
        draw(*tokens, width),
        draw(hidden, width, scale=width**-0.5),
        draw(hidden) if bias1 else None,
        draw(out, hidden, scale=hidden**-0.5),
        draw(out) if bias2 else None,
        draw(*tokens, out),
        activation,
    )


def with_gradients(function, case: Case) -> dict[str, Tensor | None]:
    """y and the five gradients of ``function(x, w1, b1, w2, b2)``."""
    leaves = [t if t is None else t.detach().clone().requires_grad_() for t in case.tensors]
    if case.x.stride() != leaves[0].stride() or case.x.data_ptr() % 16:  # keep odd strides and alignments
        leaves[0] = case.x.detach().requires_grad_()
    y = function(*leaves)
    wanted = [t for t in leaves if t is not None]
    grads = iter(torch.autograd.grad(y, wanted, case.dy))
    return dict(zip(NAMES, [y.detach(), *(None if t is None else next(grads) for t in leaves)], strict=True))


def fused(case: Case, options: Options = Options()) -> dict[str, Tensor | None]:  # noqa: B008
    return with_gradients(lambda *t: fused_mlp(*t, activation=case.activation, options=options), case)


def torch_answer(case: Case) -> dict[str, Tensor | None]:
    """The TorchMLP's computation on the same tensors."""

    def function(x, w1, b1, w2, b2):
        mlp = TorchMLP(w1.shape[1], w1.shape[0], case.activation)
        h = torch.nn.functional.linear(x, w1, b1)
        h = torch.nn.functional.gelu(h, approximate="tanh") if mlp.activation == "gelu" else h.relu()
        return torch.nn.functional.linear(h, w2, b2)

    return with_gradients(function, case)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected, in float64; NaN never passes a comparison."""
    a, e = actual.detach().double(), expected.detach().double()
    return ((a - e).norm() / e.norm().clamp_min(1e-30)).item()


@torch.no_grad()
def weights_hash(model: torch.nn.Module) -> str:
    """sha256 over names and values of all parameters: equal exactly when two models start from the same weights."""
    digest = hashlib.sha256()
    for name, p in model.state_dict().items():
        digest.update(name.encode())
        digest.update(p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
