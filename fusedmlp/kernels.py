"""The one kernel that cuBLASLt has no fast epilog for: activation gradient and bias gradient in one pass, in Triton.

After dH = dY W2 the backward pass needs dZ = dH * act'(.) and, for the bias, the sum of dZ over tokens. Separate torch
operations read dZ again for the sum; the DGELU_BGRAD and DRELU_BGRAD epilogs do it in the GEMM, but slowly on Hopper.
This kernel reads dH and the saved activation once, overwrites dH with dZ, and leaves one partial sum for each slab of
rows, which a small second reduction adds up: no atomics, so the result is the same in every run.

The only door to triton, which comes with torch's CUDA builds.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

SLAB_ROWS = 256  # tokens of one program: 64 slabs at 16,384 tokens keep the GPU busy and the second sum small
TILE_ROWS, TILE_COLUMNS = 8, 256


def available() -> bool:
    """Whether triton can be imported."""
    return find_spec("triton") is not None


def activation_gradient(dh: Tensor, saved: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """dZ and its sum over tokens.

    Args:
        dh: (tokens, hidden), contiguous; overwritten with dZ.
        saved: for ``gelu`` the input of the activation, (tokens, at least hidden); for ``relu`` its output.
        activation: ``gelu`` (tanh approximation) or ``relu``.

    Returns:
        dZ (tokens, hidden), which is ``dh``, and the bias gradient (hidden,), summed in fp32.
    """
    tokens, hidden = dh.shape
    slabs = -(-tokens // SLAB_ROWS)
    partial = torch.empty((slabs, hidden), dtype=torch.float32, device=dh.device)
    grid = (-(-hidden // TILE_COLUMNS), slabs)
    with torch.cuda.device(dh.device):
        _kernel()[grid](
            dh,
            saved,
            partial,
            tokens,
            hidden,
            saved.stride(0),
            GELU=activation == "gelu",
            SLAB=SLAB_ROWS,
            ROWS=TILE_ROWS,
            COLUMNS=TILE_COLUMNS,
            num_warps=8,
        )
    return dh, partial.sum(dim=0).to(dh.dtype)


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(  # type: ignore[no-untyped-def]
        dh_ptr,
        saved_ptr,
        partial_ptr,
        tokens,
        hidden,
        saved_stride,
        GELU: tl.constexpr,
        SLAB: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < hidden
        # Summed over tiles element by element, and over the rows of the tile once at the end: a reduction in every turn
        # would exchange data between warps each time.
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for start in range(0, SLAB, ROWS):
            rows = (tl.program_id(1) * SLAB + start + tl.arange(0, ROWS)).to(tl.int64)
            mask = (rows < tokens)[:, None] & inside[None, :]
            place = rows[:, None] * hidden + columns[None, :]
            g = tl.load(dh_ptr + place, mask=mask, other=0.0)
            s = tl.load(saved_ptr + rows[:, None] * saved_stride + columns[None, :], mask=mask, other=0.0).to(
                tl.float32
            )
            if GELU:
                u = 0.7978845608028654 * (s + 0.044715 * s * s * s)
                t = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * u))  # tanh(u), which saturates where exp overflows
                du = 0.7978845608028654 * (1.0 + 0.134145 * s * s)
                dz = g.to(tl.float32) * (0.5 * (1.0 + t) + 0.5 * s * (1.0 - t * t) * du)
            else:
                dz = tl.where(s <= 0.0, 0.0, g.to(tl.float32))  # a NaN is not <= 0: it passes on, as in torch
            rounded = dz.to(dh_ptr.dtype.element_ty)
            tl.store(dh_ptr + place, rounded, mask=mask)
            total += tl.where(mask, rounded.to(tl.float32), 0.0)
        tl.store(partial_ptr + tl.program_id(1) * hidden + columns, tl.sum(total, axis=0), mask=inside)

    return kernel
