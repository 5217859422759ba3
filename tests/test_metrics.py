"""What a step costs, and how fast it learns: counted against torch's own counter, timed on a clock made for it."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fusedmlp import metrics
from fusedmlp.config import MLPConfig, ModelConfig, OptimConfig
from fusedmlp.metrics import TrainingClock, flops_per_token, peak_flops
from fusedmlp.model import GPT
from fusedmlp.optim import learning_rate, make_optimizer

SHAPES = [
    ModelConfig(n_layer=2, n_head=2, d_model=32, block_size=16),
    ModelConfig(n_layer=1, n_head=4, d_model=64, block_size=24, d_hidden=48, bias=False, activation="relu"),
    ModelConfig(n_layer=3, n_head=1, d_model=16, block_size=8, d_hidden=100),
]


@pytest.mark.parametrize("config", SHAPES)
def test_flops_are_those_that_torch_counts(config):
    """Exactly, with nothing discounted on either side.

    torch's counter knows matrix products. With the ``math`` backend attention is two batched products over the whole
    T x T square, so the causal mask saves nothing there either. The vocabulary is a multiple of 64, since the head
    computes on the padded one (see below).
    """
    vocab, batch = 320, 3
    model = GPT(config, vocab, MLPConfig(backend="torch"))
    tokens = torch.randint(vocab, (batch, config.block_size))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    count = batch * config.block_size
    assert counter.get_total_flops() == count * flops_per_token(config, vocab)
    attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    assert attention == count * 12 * config.n_layer * config.d_model * config.block_size


def test_padding_of_the_vocabulary_is_no_useful_work():
    config = SHAPES[0]
    assert flops_per_token(config, 320) - flops_per_token(config, 257) == 6 * (320 - 257) * config.d_model
    assert GPT(config, 257).tokens.weight.shape[0] == 320


def test_flops_of_gpt2_small_by_hand():
    small = ModelConfig(n_layer=12, n_head=12, d_model=768, block_size=1024)
    matrices = 12 * (4 * 768 * 768 + 2 * 768 * 3072) + 50257 * 768  # attention, MLP, head
    assert matrices == 123_532_032
    assert flops_per_token(small, 50257) == 6 * matrices + 12 * 12 * 768 * 1024
    assert flops_per_token(small, 50257) == pytest.approx(8.54e8, rel=1e-3)  # three digits are given


def test_more_of_anything_costs_more():
    base = ModelConfig(n_layer=2, n_head=2, d_model=32, block_size=16)
    for change in ({"n_layer": 3}, {"d_model": 64}, {"d_hidden": 129}, {"block_size": 17}):
        assert flops_per_token(replace(base, **change), 320) > flops_per_token(base, 320)


@pytest.fixture
def gpu(monkeypatch):
    def pretend(name: str, capability: tuple[int, int] = (9, 0)) -> torch.device:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        return torch.device("cuda", 0)

    return pretend


def test_peak_of_a_known_gpu(gpu):
    for dtype in (torch.bfloat16, torch.float16):
        assert peak_flops(gpu("NVIDIA H200"), dtype) == 989.4e12
        assert peak_flops(gpu("NVIDIA A100-SXM4-80GB", (8, 0)), dtype) == 312e12


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA GeForce RTX 4090", "", "h200"])
def test_an_unknown_gpu_has_no_peak(gpu, name):
    assert peak_flops(gpu(name), torch.bfloat16) is None


def test_no_peak_where_the_table_does_not_apply(gpu):
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
    assert peak_flops(gpu("NVIDIA H200"), torch.float32) is None
    assert peak_flops(gpu("Tesla V100-SXM2-16GB", (7, 0)), torch.bfloat16) is None  # emulated
    assert peak_flops(gpu("Tesla V100-SXM2-16GB", (7, 0)), torch.float16) == 125e12


def test_peak_memory_of_a_process_is_its_high_water_mark():
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")
    before = metrics.peak_memory_gib(torch.device("cpu"))
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    # Read one after the other, and the kernel batches its counts by thread: a few pages apart.
    assert before == pytest.approx(int(line.split()[1]) / 2**20, rel=0.05)
    assert metrics.peak_memory_gib(torch.device("cpu")) >= before


@pytest.fixture
def clock(monkeypatch):
    """A clock whose time passes only when told to."""
    now = [100.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def wait(seconds: float) -> None:
        now[0] += seconds

    return TrainingClock(), wait


def test_the_clock_counts_training_only(clock):
    training, wait = clock
    wait(2)
    training.pause()
    wait(1000)  # an evaluation
    training.go_on()
    wait(3)
    training.pause()
    wait(500)  # a checkpoint
    training.go_on()
    assert training.lap() == 5
    wait(7)
    assert training.lap() == 7  # nothing is left over from before
    assert training.lap() == 0


def test_the_clock_starts_at_once_and_a_pause_may_end_a_lap(clock):
    training, wait = clock
    wait(1)
    assert training.lap() == 1
    training.pause()
    wait(9)
    training.go_on()
    assert training.lap() == 0


# ---------------------------------------------------------------------------------------------------------------------
# Learning rate and optimizer

OPTIM = OptimConfig(lr=1e-2, min_lr=1e-3, warmup_steps=10)


def test_warmup_is_linear_and_ends_at_the_peak():
    assert [learning_rate(s, OPTIM, 100) for s in range(1, 11)] == pytest.approx([1e-3 * s for s in range(1, 11)])
    assert learning_rate(10, OPTIM, 100) == OPTIM.lr


def test_cosine_goes_down_to_the_minimum():
    after = [learning_rate(s, OPTIM, 100) for s in range(10, 101)]
    assert all(a > b for a, b in pairwise(after))
    assert after[-1] == OPTIM.min_lr
    assert learning_rate(55, OPTIM, 100) == pytest.approx((OPTIM.lr + OPTIM.min_lr) / 2)  # half way
    assert learning_rate(101, OPTIM, 100) == OPTIM.min_lr  # a resumed run with a smaller max_steps stays there


def test_no_warmup_and_nothing_but_warmup():
    without = replace(OPTIM, warmup_steps=0)
    assert learning_rate(1, without, 100) == pytest.approx(OPTIM.lr, rel=1e-3)  # a hundredth of the way down a cosine
    assert learning_rate(1, without, 1) == OPTIM.min_lr
    only = replace(OPTIM, warmup_steps=4)
    assert [learning_rate(s, only, 4) for s in range(1, 5)] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2])


@given(
    lr=st.floats(1e-8, 1e3),
    share=st.floats(0, 1),
    warmup=st.integers(0, 2000),
    more=st.integers(0, 10**6),
    data=st.data(),
)
def test_learning_rate_stays_within_its_bounds(lr, share, warmup, more, data):
    config = OptimConfig(lr=lr, min_lr=lr * share, warmup_steps=warmup)
    max_steps = max(1, warmup + more)
    step = data.draw(st.integers(1, max_steps))
    rate = learning_rate(step, config, max_steps)
    assert math.isfinite(rate)
    # (a / b) * b and m + (a - m) are each within two roundings of a
    assert 0 <= rate <= lr * (1 + 4e-16)
    assert rate > 0 or config.min_lr == 0
    if step > warmup:
        assert rate >= config.min_lr * (1 - 4e-16)


@pytest.mark.parametrize("config", SHAPES)
@pytest.mark.parametrize("backend", ["torch", "fused"])
def test_decay_is_for_matrices_and_embeddings_only(config, backend):
    model = GPT(config, 257, MLPConfig(backend=backend))
    optimizer = make_optimizer(model, OptimConfig(weight_decay=0.25, beta1=0.8, beta2=0.9, lr=0.01))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(decay)  # none twice
    assert {id(p) for p in model.parameters()} == decay.keys()  # none left out
    for name, p in model.named_parameters():
        assert decay[id(p)] == (0.0 if "norm" in name or name.endswith("bias") else 0.25), name
    assert all((g["lr"], g["betas"]) == (0.01, (0.8, 0.9)) for g in optimizer.param_groups)


def test_frozen_parameters_are_not_optimized():
    model = GPT(SHAPES[0], 257)
    model.positions.weight.requires_grad_(False)
    groups = make_optimizer(model, OPTIM).param_groups
    assert all(p is not model.positions.weight for g in groups for p in g["params"])
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters())) - 1


def test_decay_shrinks_a_matrix_without_gradient_and_leaves_a_bias():
    model = GPT(SHAPES[0], 257)
    config = OptimConfig(lr=0.1, min_lr=0.0, weight_decay=0.5)
    fc1 = model.blocks[0].mlp.fc1
    with torch.no_grad():
        fc1.bias.fill_(1)
    before = fc1.weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    make_optimizer(model, config).step()
    torch.testing.assert_close(fc1.weight.detach(), before * (1 - 0.1 * 0.5))  # decoupled: lr times decay; fp32
    assert torch.equal(fc1.bias.detach(), torch.ones_like(fc1.bias))
