"""Every candidate of every stage on a real GPU, not only the winners: ``pytest -m gpu``."""

import pytest
import torch
from mlp_cases import fused, make_case, relative_error
from torch.nn import functional as F

from fusedmlp import gemms, kernels, plans, race, recipes, stages
from fusedmlp.plans import Unsupported
from fusedmlp.recipes import Options
from fusedmlp.store import PlanStore

pytestmark = pytest.mark.gpu

SHAPES = [(512, 256, 1024), (129, 64, 192), (16, 96, 100)]  # tokens, width, hidden; 100 pads GELU's aux


def gemm(*args, **kwargs):
    return gemms.gemm(*args, tune=False, **kwargs)


class Problem:
    """Random tensors of one MLP, its stages in float64, and in its own dtype by torch."""

    def __init__(self, shape, dtype, activation, dtype_of_answer):
        tokens, width, hidden = shape
        g = torch.Generator("cuda").manual_seed(0)

        def draw(*size, scale=1.0):
            return (torch.randn(*size, generator=g, device="cuda") * scale).to(dtype)

        self.x, self.w1, self.b1 = draw(tokens, width), draw(hidden, width, scale=width**-0.5), draw(hidden)
        self.w2, self.b2, self.dy = draw(width, hidden, scale=hidden**-0.5), draw(width), draw(tokens, width)
        relu = activation == "relu"

        def act(z):
            return z.relu() if relu else F.gelu(z, approximate="tanh")

        z = F.linear(self.x, self.w1, self.b1)
        self.h = act(z)
        padded = F.pad(z, (0, -hidden % 8))
        self.aux = z.new_empty((0, 0)) if relu else padded
        t = {k: getattr(self, k).to(dtype_of_answer) for k in ("x", "w1", "b1", "w2", "b2", "dy", "h")}
        wide_z = z.to(dtype_of_answer)
        self.answers = {"fc1": act(F.linear(t["x"], t["w1"], t["b1"])), "fc2": F.linear(t["h"], t["w2"], t["b2"])}
        self.answers["wgrad2"] = (t["dy"].T @ t["h"], t["dy"].sum(0))
        dh = t["dy"] @ t["w2"]
        dz = dh * (t["h"] > 0) if relu else torch.ops.aten.gelu_backward(dh, wide_z, approximate="tanh")
        self.answers["hidden"] = (dz, dz.T @ t["x"], dz.sum(0))
        self.dz = dz.to(dtype)
        self.answers["dgrad1"] = self.dz.to(dtype_of_answer) @ t["w1"]


def flat(result):
    return [r for r in (result if isinstance(result, tuple) else (result,)) if r is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_candidate_is_as_good_as_torch(shape, activation, dtype):
    exact = dtype is torch.float32
    right, theirs = (Problem(shape, dtype, activation, d) for d in (torch.float64, dtype))
    p = theirs
    menus = {
        "fc1": (stages.fc1(gemm, activation, keep=True, exact=exact), (p.x, p.w1, p.b1)),
        "fc1 inference": (stages.fc1(gemm, activation, keep=False, exact=exact), (p.x, p.w1, p.b1)),
        "fc2": (stages.fc2(gemm), (p.h, p.w2, p.b2)),
        "wgrad2": (stages.wgrad(gemm, True, True), (p.h, p.dy)),
        "hidden": (stages.hidden(gemm, activation, True, True, exact=exact), (p.dy, p.w2, p.h, p.aux, p.x)),
        "dgrad1": (stages.dgrad1(gemm), (p.dz, p.w1)),
    }
    eps = torch.finfo(dtype).eps
    tried = 0
    for name, (menu, tensors) in menus.items():
        stage = name.split()[0]
        for candidate, run in menu.items():
            try:
                actual = flat(run(*tensors))
            except Unsupported:
                assert shape == SHAPES[-1] or shape == SHAPES[1], f"{name} {candidate}"
                continue
            tried += 1
            expected, torchs = flat(right.answers[stage]), flat(theirs.answers[stage])
            for a, e, t in zip(actual[: len(expected)], expected, torchs, strict=True):
                assert a.is_contiguous(), (name, candidate)
                limit = 2 * relative_error(t, e) + 2 * eps
                assert relative_error(a, e) <= limit, (name, candidate, relative_error(a, e), limit)
    assert tried >= 14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("shape", [(1, 8), (257, 100), (300, 4096), (16, 257)])
def test_the_kernel(shape, activation, dtype):
    assert kernels.available()
    g = torch.Generator("cuda").manual_seed(1)
    dh = torch.randn(*shape, generator=g, device="cuda").to(dtype)
    saved = torch.randn(shape[0], shape[1] + 24, generator=g, device="cuda").to(dtype)[:, : shape[1]]
    saved[0, 0], saved[-1, -1] = 30.0, -30.0
    if activation == "relu":
        expected = torch.ops.aten.threshold_backward(dh.double(), saved.double(), 0)
    else:
        expected = torch.ops.aten.gelu_backward(dh.double(), saved.double(), approximate="tanh")
    given = dh.clone()
    dz, db = kernels.activation_gradient(given, saved, activation)
    assert dz.data_ptr() == given.data_ptr()
    eps = torch.finfo(dtype).eps
    assert relative_error(dz, expected) <= 2 * eps + 1e-6  # exp in the GPU's fast form
    assert relative_error(db, expected.sum(0)) <= 4 * eps + 2e-6
    again, db_again = kernels.activation_gradient(dh.clone(), saved, activation)
    assert torch.equal(dz, again)
    assert torch.equal(db, db_again)


def test_the_kernel_passes_nan_on():
    dh = torch.ones(4, 8, device="cuda")
    saved = torch.ones(4, 8, device="cuda")
    saved[1, 2] = torch.nan
    dz, db = kernels.activation_gradient(dh.clone(), saved, "gelu")
    assert dz[1, 2].isnan()
    assert db[2].isnan()
    dh[2, 3] = torch.nan
    dz, db = kernels.activation_gradient(dh.clone(), saved.nan_to_num(1.0), "relu")
    assert dz[2, 3].isnan()
    assert db[3].isnan()


def test_a_race_is_held_once_and_a_warm_store_needs_none(tmp_path, monkeypatch):
    path = tmp_path / "plans.json"
    gemms.use_store(str(path))
    gemms.cache.clear()
    recipes.forget()
    case = make_case((4, 128), 128, 512, dtype=torch.bfloat16, device="cuda")
    measured = Options("nvmath", "error", "measured")
    first = fused(case, measured)
    chosen = {r["problem"]: r["winner"] for r in recipes.report()}
    assert len(chosen) == 5  # fc1, fc2, wgrad2, hidden, dgrad1
    assert all(len(r["times_us"]) >= 2 for r in recipes.report())
    races = []
    real = race.hold
    monkeypatch.setattr(race, "hold", lambda *a: (races.append(1), real(*a))[1])
    fused(case, measured)
    assert not races
    # A new process with the same store: nothing is raced or tuned, and every bit is the same.
    gemms.use_store(str(path))
    gemms.cache.clear()
    recipes.forget()
    before = plans.stats.tune_ms
    again = fused(case, measured)
    assert not races
    assert plans.stats.tune_ms - before < 5
    assert {r["problem"]: r["winner"] for r in recipes.report()} == chosen
    assert all(torch.equal(first[k], again[k]) for k in first)
    gemms.use_store(None)


def test_a_damaged_algorithm_is_searched_again(tmp_path):
    path = tmp_path / "plans.json"
    gemms.use_store(str(path))
    gemms.cache.clear()
    recipes.forget()
    case = make_case((4, 128), 128, 512, dtype=torch.bfloat16, device="cuda")
    measured = Options("nvmath", "error", "measured")
    first = fused(case, measured)
    store = gemms.store_of(torch.device("cuda:0"))
    garbage = PlanStore(path, store.fingerprint)
    for key, algorithm in garbage.algorithms.items():
        garbage.algorithms[key] = type(algorithm)(b"\xff" * 64, algorithm.workspace_bytes)
    store.algorithms = garbage.algorithms
    gemms.cache.clear()
    again = fused(case, measured)
    assert all(relative_error(again[k], first[k]) < 1e-2 for k in first)  # bf16, perhaps by another algorithm
    assert any(a.data != b"\xff" * 64 for a in store.algorithms.values())  # those in use were found anew
    gemms.use_store(None)
