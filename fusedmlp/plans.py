"""Plans: one cuBLASLt GEMM with an epilog, planned and autotuned once, executed many times. The only door to nvmath.

Planning asks cuBLASLt's heuristic for algorithms (about a millisecond) and autotuning times them on the GPU (a few
hundred). Both synchronise, so they happen once for each problem, and the winner is kept. ``nvmath``'s ``Matmul`` does
both. Executing through ``Matmul`` as well would cost about 100 us of host time a call, more than many of these GEMMs
take on the GPU; a :class:`Plan` therefore keeps descriptors of its own and launches through nvmath's low-level
binding, which costs what ``torch.nn.functional.linear`` does.

Execution is asynchronous, on torch's current stream: outputs come from torch's allocator, so the usual rules of torch
streams hold, and nothing here keeps an operand alive.

Letters M, N, K, A, B, D: see :mod:`fusedmlp.epilogs`. Sources: the cuBLASLt API reference; the source of nvmath-python
1.0, whose descriptors are reproduced here, since an algorithm is only valid for the problem that it was found for.
"""

import logging
import threading
import time
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedmlp.epilogs import HAS_BIAS, READS_AUX, WRITES_AUX, WRITES_BGRAD, Epilog, Result, gelu_aux_rows, relu_aux_rows
from fusedmlp.store import WORKSPACE_LIMIT, Algorithm

MAX_ALGORITHMS = 8  # asking the heuristic for more returned no more
TUNE_ITERATIONS = 5

# nvmath logs every phase at INFO and, when INFO is on, times each call with a synchronisation.
_nvmath_log = logging.getLogger("fusedmlp.nvmath")
_nvmath_log.setLevel(logging.WARNING)

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
# Which dtypes each compute type takes. The FAST types round *fp32* inputs to something narrower inside the GEMM; with
# fp16 or bf16 tensors they are refused, since COMPUTE_32F already reads those as they are and accumulates in fp32.
COMPUTE_TYPES = {
    "COMPUTE_32F": (torch.bfloat16, torch.float16, torch.float32),
    "COMPUTE_32F_PEDANTIC": (torch.bfloat16, torch.float16, torch.float32),
    "COMPUTE_32F_FAST_TF32": (torch.float32,),
    "COMPUTE_32F_FAST_16BF": (torch.float32,),
    "COMPUTE_32F_FAST_16F": (torch.float32,),
    "COMPUTE_16F": (torch.float16,),
}


class Unsupported(RuntimeError):
    """What was asked for is beyond cuBLASLt or nvmath; the message says which constraint was broken."""


@dataclass(slots=True)
class PlanStats:
    """Counters of this process, for the run log."""

    plans: int = 0
    """Plans made."""
    plan_hits: int = 0
    """GEMMs that found their plan."""
    plan_misses: int = 0
    """GEMMs that had to plan first."""
    plan_ms: float = 0.0
    """Host time spent in planning, autotuning not included, milliseconds."""
    tune_ms: float = 0.0
    """Time spent in autotuning, milliseconds."""
    workspace_mib: float = 0.0
    """Largest workspace that a plan asks for, MiB. It is taken from torch's allocator for the time of the call."""


def check_compute_type(name: str | None, dtype: torch.dtype) -> None:
    """Raise :class:`Unsupported` with the table of possible pairs when ``name`` does not take ``dtype``."""
    if name is not None and dtype not in COMPUTE_TYPES[name]:
        table = "; ".join(f"{n}: {', '.join(DTYPES[d] for d in dtypes)}" for n, dtypes in COMPUTE_TYPES.items())
        raise Unsupported(f"compute type {name} does not take {str(dtype).removeprefix('torch.')} tensors ({table})")


@dataclass(frozen=True, slots=True)
class Operand:
    """How a 2-D tensor lies in memory."""

    rows: int
    cols: int
    ld: int
    column_major: bool
    alignment: int  # of the pointer, bytes: an algorithm may need what the heuristic was shown

    @classmethod
    def of(cls, t: Tensor) -> "Operand":
        """Describe ``t``; raises :class:`Unsupported` for a matrix that is neither row- nor column-major."""
        (rows, cols), (s0, s1) = t.shape, t.stride()
        pointer = t.data_ptr()
        alignment = min(pointer & -pointer, 256)
        # Same order of tests as nvmath, so that degenerate shapes are described alike.
        if s0 == 1:
            return cls(rows, cols, max(rows, s1), True, alignment)
        if s1 == 1:
            return cls(rows, cols, max(cols, s0), False, alignment)
        raise Unsupported(f"a matrix with strides {(s0, s1)} is neither row-major nor column-major")

    def __str__(self) -> str:
        """For keys of the plan store: shape, order and leading dimension, alignment."""
        return f"{self.rows}x{self.cols}{'c' if self.column_major else 'r'}{self.ld}@{self.alignment}"

    def transposed(self) -> "Operand":
        """The same memory, read as the transpose."""
        return Operand(self.cols, self.rows, self.ld, not self.column_major, self.alignment)


class Plan:
    """A GEMM with its epilog for one problem, ready to launch.

    Args:
        epilog: what follows the multiplication.
        a, b, bias, aux: operands as :meth:`run` takes them; planning and autotuning read them.
        compute_type: a name of :data:`COMPUTE_TYPES`, or None for COMPUTE_32F.
        tune: time the heuristic's algorithms and take the fastest, instead of the first.
        stored: the algorithm to use, if cuBLASLt still accepts it: no search then.

    Raises:
        Unsupported: cuBLASLt or nvmath refuses the problem.
    """

    def __init__(
        self,
        epilog: Epilog,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        aux: Tensor | None,
        compute_type: str | None,
        tune: bool,
        stored: Algorithm | None = None,
    ) -> None:
        self._descriptors: list[tuple[Any, int]] = []  # (destroy, handle)
        self._library_error: type[Exception] = RuntimeError
        self.epilog = epilog
        self.m, self.k = a.shape
        self.n = b.shape[1]
        self.dtype, self.device = a.dtype, a.device
        compute_name = compute_type or "COMPUTE_32F"
        with torch.cuda.device(self.device):
            try:
                self._describe(Operand.of(a), Operand.of(b), compute_name)
                if stored is None or not self._accepts(stored):
                    stored = self._search(a, b, bias, aux, compute_name, tune)
            except torch.OutOfMemoryError:
                raise
            except (ValueError, TypeError, RuntimeError, self._library_error) as error:
                # nvmath's own checks, and the library's
                raise Unsupported(f"{self}: {' '.join(str(error).split())}") from error
        self.algorithm = stored
        self._algorithm = np.frombuffer(stored.data, np.uint64).copy()
        self._algorithm_ptr = self._algorithm.ctypes.data
        # nvmath adds 16 bytes for a library problem with epilogs.
        self.workspace_bytes = stored.workspace_bytes + 16 if stored.workspace_bytes else 0
        stats.workspace_mib = max(stats.workspace_mib, self.workspace_bytes / 2**20)
        scale = np.float16 if compute_name == "COMPUTE_16F" else np.float32
        self._alpha, self._beta = np.ones(1, scale), np.zeros(1, scale)
        self._alpha_ptr, self._beta_ptr = self._alpha.ctypes.data, self._beta.ctypes.data
        # The descriptor carries the pointers of bias and aux, so setting them and launching must not interleave with
        # another thread (autograd runs the backward pass in one of its own).
        self._lock = threading.Lock()
        self._pointer = np.zeros(1, np.int64)
        self._pointer_ptr = self._pointer.ctypes.data

    def _accepts(self, algorithm: Algorithm) -> bool:
        """Whether cuBLASLt takes a stored algorithm for this very problem, within the workspace limit."""
        from nvmath.bindings import cublasLt as lt

        data = np.frombuffer(algorithm.data, np.uint64).copy()
        result = lt.MatmulHeuristicResult(1)
        layouts = (self._a_layout, self._b_layout, self._d_layout, self._d_layout)
        try:
            lt.matmul_algo_check(self._handle, self._desc, *layouts, data.ctypes.data, result.ptr)
        except lt.cuBLASLtError:
            return False
        return int(np.max(result["workspace_size"])) <= min(algorithm.workspace_bytes, WORKSPACE_LIMIT)

    def _search(
        self, a: Tensor, b: Tensor, bias: Tensor | None, aux: Tensor | None, compute_name: str, tune: bool
    ) -> Algorithm:
        """Find the algorithm with nvmath's ``Matmul``."""
        from nvmath.bindings import cublas
        from nvmath.linalg.advanced import Matmul, MatmulEpilog, MatmulOptions

        epilog = None if self.epilog is Epilog.DEFAULT else MatmulEpilog[self.epilog]
        inputs = {} if bias is None else {"bias": bias}
        if aux is not None:
            inputs["relu_aux" if "RELU" in self.epilog else "gelu_aux"] = aux
        options = MatmulOptions(
            compute_type=cublas.ComputeType[compute_name], memory_limit=WORKSPACE_LIMIT, logger=_nvmath_log
        )
        start = time.perf_counter()
        with Matmul(a, b, options=options) as matmul:
            matmul.plan(epilog=epilog, epilog_inputs=inputs or None, preferences={"limit": MAX_ALGORITHMS})
            planned = time.perf_counter()
            if tune:
                matmul.autotune(iterations=TUNE_ITERATIONS)
            found = matmul.algorithms[0].as_numpy()
            torch.cuda.synchronize()  # autotuning's buffers are freed on leaving
        stats.plan_ms += (planned - start) * 1e3
        stats.tune_ms += (time.perf_counter() - planned) * 1e3
        return Algorithm(found["algo"].tobytes(), int(found["workspace_size"][0]))

    def _describe(self, a: Operand, b: Operand, compute_name: str) -> None:
        """Make the descriptors that :meth:`run` launches with, attribute by attribute as nvmath makes them."""
        from nvmath import CudaDataType
        from nvmath.bindings import cublas
        from nvmath.bindings import cublasLt as lt

        self._library_error = lt.cuBLASLtError
        self._launch, self._set_attribute = lt.matmul, lt.matmul_desc_set_attribute
        self._handle = _handle(self.device.index)
        kinds = {
            torch.bfloat16: CudaDataType.CUDA_R_16BF,
            torch.float16: CudaDataType.CUDA_R_16F,
            torch.float32: CudaDataType.CUDA_R_32F,
        }
        scale = CudaDataType.CUDA_R_16F if compute_name == "COMPUTE_16F" else CudaDataType.CUDA_R_32F
        self._desc = lt.matmul_desc_create(cublas.ComputeType[compute_name], scale)
        self._descriptors.append((lt.matmul_desc_destroy, self._desc))
        attributes = lt.MatmulDescAttribute
        self._bias_attribute = int(attributes.BIAS_POINTER)
        self._aux_attribute = int(attributes.EPILOGUE_AUX_POINTER)

        def put(attribute: Any, value: int) -> None:
            buffer = np.array([value], dtype=lt.get_matmul_desc_attribute_dtype(attribute))
            lt.matmul_desc_set_attribute(self._desc, attribute, buffer.ctypes.data, buffer.nbytes)

        if self.epilog is not Epilog.DEFAULT:
            put(attributes.EPILOGUE, lt.Epilogue[self.epilog])
        # cuBLASLt refuses to look at a problem whose pointers are null; run() sets the real ones.
        if self.epilog in HAS_BIAS | WRITES_BGRAD:
            put(attributes.BIAS_POINTER, 256)
        if self.epilog in WRITES_AUX | READS_AUX:
            put(attributes.EPILOGUE_AUX_POINTER, 256)
        self._aux_rows = 0
        if self.epilog in WRITES_AUX | READS_AUX:
            relu = "RELU" in self.epilog
            self._aux_rows = relu_aux_rows(self.m) if relu else gelu_aux_rows(self.m)
            self._aux_dtype = torch.uint8 if relu else self.dtype
            put(
                attributes.EPILOGUE_AUX_LD, self._aux_rows * 8 if relu else self._aux_rows
            )  # in elements: bits, for ReLU
        if (
            self.epilog is Epilog.BGRADB
        ):  # cuBLASLt wants B transposed for this one: describe Bᵀ and ask for its transpose
            put(attributes.TRANSB, cublas.Operation.T)
            b = b.transposed()

        def layout(operand: Operand) -> int:
            handle = lt.matrix_layout_create(kinds[self.dtype], operand.rows, operand.cols, operand.ld)
            self._descriptors.append((lt.matrix_layout_destroy, handle))
            order = np.array(
                [lt.Order.COL if operand.column_major else lt.Order.ROW],
                dtype=lt.get_matrix_layout_attribute_dtype(lt.MatrixLayoutAttribute.ORDER),
            )
            lt.matrix_layout_set_attribute(handle, lt.MatrixLayoutAttribute.ORDER, order.ctypes.data, order.nbytes)
            return int(handle)

        self._a_layout, self._b_layout = layout(a), layout(b)
        self._d_layout = layout(Operand(self.m, self.n, self.m, True, 256))

    def run(self, a: Tensor, b: Tensor, bias: Tensor | None, aux: Tensor | None) -> Result:
        """Launch on the current stream: A (M, K), B (K, N), bias (M,), aux (padded M, N) -> :class:`Result`."""
        device = self.device
        d = torch.empty((self.n, self.m), dtype=self.dtype, device=device)
        bgrad: Tensor | None = None
        out_aux: Tensor | None = None
        if self.epilog in WRITES_BGRAD:
            bgrad = torch.empty(self.n if self.epilog is Epilog.BGRADB else self.m, dtype=self.dtype, device=device)
        if self.epilog in WRITES_AUX:
            out_aux = aux = torch.empty((self.n, self._aux_rows), dtype=self._aux_dtype, device=device).T
        workspace_ptr = 0
        if self.workspace_bytes:
            # From torch's caching allocator, for this call: safe on any stream and during graph capture.
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=device)
            workspace_ptr = workspace.data_ptr()
        vector = bgrad if bgrad is not None else bias  # a bias gradient is written through the bias pointer
        with self._lock:
            if vector is not None:
                self._point(self._bias_attribute, vector)
            if aux is not None:
                self._point(self._aux_attribute, aux)
            self._launch(
                self._handle,
                self._desc,
                self._alpha_ptr,
                a.data_ptr(),
                self._a_layout,
                b.data_ptr(),
                self._b_layout,
                self._beta_ptr,
                0,
                self._d_layout,
                d.data_ptr(),
                self._d_layout,
                self._algorithm_ptr,
                workspace_ptr,
                self.workspace_bytes,
                torch._C._cuda_getCurrentRawStream(device.index),
            )
        return Result(d.T, out_aux, bgrad)

    def _point(self, attribute: int, tensor: Tensor) -> None:
        self._pointer[0] = tensor.data_ptr()
        self._set_attribute(self._desc, attribute, self._pointer_ptr, 8)

    def __str__(self) -> str:
        """The problem as refusals name it: without the number of tokens, so that one constraint is one reason."""
        return f"{self.epilog} in {DTYPES[self.dtype]} with {self.m} rows and K={self.k}"

    def __del__(self) -> None:
        """Destroy the descriptors; launched work does not need them any more."""
        for destroy, handle in self._descriptors:
            destroy(handle)
        self._descriptors.clear()


stats = PlanStats()
_handles: dict[int, int] = {}


def _handle(device_index: int) -> int:
    """The cuBLASLt handle of a device, made once and kept until the process ends."""
    from nvmath.bindings import cublasLt as lt

    if device_index not in _handles:
        _handles[device_index] = int(lt.create())
    return _handles[device_index]


def cublaslt_version() -> int | None:
    """Version of the cuBLASLt that would be used, for example 130100; None where there is none."""
    try:
        from nvmath.bindings import cublasLt as lt

        return int(lt.get_version())
    except (ImportError, RuntimeError):
        return None


def why_unavailable(device: torch.device) -> str | None:
    """Why nvmath cannot run on ``device``, or None when it can."""
    if device.type != "cuda":
        return f"the nvmath engine needs a CUDA device, and the tensors are on {device.type}"
    return _why_no_cublaslt()


_library_reason: list[str | None] = []


def _why_no_cublaslt() -> str | None:
    if not _library_reason:
        try:
            import nvmath.linalg.advanced  # noqa: F401

            version = cublaslt_version()
            _library_reason.append(None if version is not None else "cuBLASLt was not found by nvmath-python")
        except ImportError as error:
            _library_reason.append(f"nvmath-python cannot be imported: {error}")
    return _library_reason[0]


def stats_row() -> dict[str, float]:
    """The counters as metric values, by their field names."""
    return {f.name: getattr(stats, f.name) for f in fields(stats)}
