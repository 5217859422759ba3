"""GEMMs with epilogs by problem: each finds its plan, or has it made, and is launched.

A *problem* is everything that an algorithm may depend on: epilog, shapes, strides, alignment of the pointers, dtype,
compute type, device. Plans are kept for the process, the least recently used going first, and autotuned algorithms in
the plan store as well, so that a known problem starts without a search.
"""

import threading
from collections import OrderedDict, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedmlp import plans
from fusedmlp.environment import describe
from fusedmlp.epilogs import HAS_BIAS, Epilog, Result
from fusedmlp.files import cache_directory
from fusedmlp.plans import DTYPES, Operand, Plan, Unsupported, cublaslt_version
from fusedmlp.store import PlanStore

MAX_PLANS = 512  # least recently used plans go first; a plan is a few kilobytes of host memory
MAX_TUNED = 16  # plans of one epilog and width that are autotuned: further token counts take the heuristic's first


class PlanCache:
    """Plans by problem, bounded, shared by all threads."""

    def __init__(self, capacity: int = MAX_PLANS) -> None:
        self.capacity = capacity
        self._plans: OrderedDict[tuple[Any, ...], Plan | Unsupported] = OrderedDict()
        self._tuned: defaultdict[tuple[Any, ...], set[str]] = defaultdict(set)  # names, those from the store too
        self._lock = threading.RLock()

    def find(
        self,
        epilog: Epilog,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        aux: Tensor | None,
        compute_type: str | None,
        tune: bool,
    ) -> Plan:
        """The plan for this problem, made now if this is the first time.

        Raises:
            Unsupported: the problem was refused, now or before (a refusal is remembered).
            RuntimeError: the plan would have to be made while a CUDA graph is being captured.
        """
        # Plain integers, since this is built for every GEMM; the lowest set bit of a pointer is its alignment (0: 256).
        pa, pb = a.data_ptr(), b.data_ptr()
        low = (pa & -pa & 255, pb & -pb & 255)
        key = (epilog, a.shape, a.stride(), b.shape, b.stride(), low, a.dtype, a.device.index, compute_type, tune)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make(key, epilog, a, b, bias, aux, compute_type, tune)
        else:
            # Atomic, like get: no lock for a plan that is there. Another thread may just have evicted it; no harm done.
            with suppress(KeyError):
                self._plans.move_to_end(key)
            plans.stats.plan_hits += not isinstance(plan, Unsupported)
        if isinstance(plan, Unsupported):
            raise Unsupported(str(plan))  # a new one: raising would hang a traceback on the remembered one
        return plan

    def _make(
        self,
        key: tuple[Any, ...],
        epilog: Epilog,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        aux: Tensor | None,
        compute_type: str | None,
        tune: bool,
    ) -> Plan | Unsupported:
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:  # another thread made it meanwhile
                plans.stats.plan_hits += not isinstance(plan, Unsupported)
                return plan
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"no plan yet for {epilog} of {tuple(a.shape)} {tuple(b.shape)}, and planning synchronises, "
                    "which a CUDA graph capture forbids: run the same shapes once before capturing"
                )
            plans.stats.plan_misses += 1
            store = store_of(a.device)
            name = f"{epilog} {Operand.of(a)} {Operand.of(b)} {DTYPES[a.dtype]} {compute_type or 'default'}"
            family = (epilog, a.shape[0], a.dtype, a.device.index)
            tune = tune and len(self._tuned[family] - {name}) < MAX_TUNED
            try:
                stored = store.algorithms.get(name) if key[-1] else None  # heuristic plans are not stored
                plan = plans.Plan(epilog, a, b, bias, aux, compute_type, tune, stored)
                plans.stats.plans += 1
                if tune:
                    self._tuned[family].add(name)
                    if plan.algorithm is not stored:
                        store.add_algorithm(name, plan.algorithm, instead_of=stored)
            except Unsupported as refusal:
                plan = Unsupported(str(refusal))  # without the traceback, which would keep the operands alive
            self._plans[key] = plan
            while len(self._plans) > self.capacity:
                self._plans.popitem(last=False)
            return plan

    def clear(self) -> None:
        """Forget all plans and refusals."""
        with self._lock:
            self._plans.clear()
            self._tuned.clear()

    def __len__(self) -> int:
        """Problems known."""
        return len(self._plans)


cache = PlanCache()
_zeros: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
_stores: dict[int, PlanStore] = {}
_stores_lock = threading.RLock()
_store_path: list[str | None] = [None]


def use_store(path: str | None) -> None:
    """Keep algorithms and races in a file from now on.

    Args:
        path: the file; ``auto`` for one in the cache directory that is named for the GPU; None for this process only.
    """
    _store_path[0] = path
    _stores.clear()


def store_of(device: torch.device) -> PlanStore:
    """The store for what was measured on ``device``."""
    index = device.index or 0
    with _stores_lock:
        return _stores.get(index) or _open_store(device, index)


def _open_store(device: torch.device, index: int) -> PlanStore:
    found = describe(device, cublaslt_version=cublaslt_version())
    fingerprint = {k: found[k] for k in ("gpu", "sm_count", "driver", "cublaslt", "nvmath", "torch", "triton")}
    path = _store_path[0]
    if path == "auto":
        path = str(cache_directory() / "plans" / f"{str(found['gpu']).replace(' ', '_')}.json")
    _stores[index] = PlanStore(Path(path).expanduser() if path else None, fingerprint)
    return _stores[index]


def gemm(
    epilog: Epilog,
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    aux: Tensor | None = None,
    compute_type: str | None = None,
    tune: bool = True,
) -> Result:
    """One GEMM with its epilog on the GPU: the same contract as :func:`fusedmlp.epilogs.gemm`.

    Args:
        epilog: what to compute.
        a: (M, K), row- or column-major.
        b: (K, N), row- or column-major.
        bias: (M,); an absent bias is a bias of zeros.
        aux: (padded M, N), as an *_AUX_BIAS epilog wrote it.
        compute_type: a name of :data:`COMPUTE_TYPES`, or None.
        tune: autotune a new plan.

    Raises:
        Unsupported: cuBLASLt or nvmath refuses the problem.
    """
    if (a.data_ptr() | b.data_ptr()) & 15:
        a, b = aligned(a), aligned(b)
    if epilog in HAS_BIAS:
        bias = _zero_bias(a.shape[0], a) if bias is None else aligned(bias)
    plan = cache.find(epilog, a, b, bias, aux, compute_type, tune)
    return plan.run(a, b, bias, aux)


def aligned(t: Tensor) -> Tensor:
    """``t`` itself, or a copy when its pointer is not a multiple of 16 bytes: no fast algorithm takes it then."""
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _zero_bias(m: int, like: Tensor) -> Tensor:
    key = (m, like.dtype, like.device)
    if key not in _zeros:
        _zeros[key] = torch.zeros(m, dtype=like.dtype, device=like.device)
    return _zeros[key]
