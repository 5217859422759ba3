"""The two arms: same parameters, same start, exchangeable checkpoints, same function."""

import pytest
import torch
from mlp_cases import relative_error, weights_hash

from fusedmlp.config import MLPConfig, ModelConfig
from fusedmlp.mlp import FusedMLP, TorchMLP, torch_mlps
from fusedmlp.model import GPT


@pytest.mark.parametrize("bias", [True, False])
def test_arms_share_names_initialisation_and_state(bias):
    torch.manual_seed(3)
    fused = FusedMLP(12, 20, bias=bias)
    torch.manual_seed(3)
    plain = TorchMLP(12, 20, bias=bias)
    names = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"] if bias else ["fc1.weight", "fc2.weight"]
    assert [n for n, _ in fused.named_parameters()] == names
    assert weights_hash(fused) == weights_hash(plain)
    plain.load_state_dict(TorchMLP(12, 20, bias=bias).state_dict())
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(5, 12)
    assert relative_error(fused(x), plain(x)) < 1e-6  # fp32


def test_unknown_activation_is_refused():
    for arm in (FusedMLP, TorchMLP):
        with pytest.raises(ValueError, match="not one of gelu, relu"):
            arm(4, 8, "tanh")


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_gpt_arms_start_equal_and_give_equal_losses_and_gradients(activation):
    config = ModelConfig(n_layer=2, n_head=2, d_model=32, block_size=16, activation=activation)
    models = []
    for backend in ("fused", "torch"):
        torch.manual_seed(0)
        models.append(GPT(config, 257, MLPConfig(backend=backend)).double())
    assert weights_hash(models[0]) == weights_hash(models[1])
    tokens = torch.randint(257, (3, 16), generator=torch.Generator().manual_seed(1))
    losses = [m(tokens, tokens.roll(-1, 1)) for m in models]
    assert abs(losses[0].item() - losses[1].item()) < 1e-12
    grads = [torch.autograd.grad(loss, list(m.parameters())) for loss, m in zip(losses, models, strict=True)]
    assert all(relative_error(a, b) < 1e-10 for a, b in zip(*grads, strict=True))


def test_torch_mlps_switches_every_block_and_switches_back():
    model = GPT(ModelConfig(n_layer=2, n_head=2, d_model=32, block_size=16), 257)
    fused = [b.mlp for b in model.blocks]
    with torch_mlps(model):
        assert all(m.as_torch for m in fused)
    assert not any(m.as_torch for m in fused)


def test_gpt_shapes_and_limits():
    model = GPT(ModelConfig(n_layer=1, n_head=2, d_model=32, block_size=8), 257)
    assert model.tokens.weight.shape == (320, 32)
    assert model.next_logits(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 257)
    with pytest.raises(ValueError, match=r"exceed model\.block_size=8"):
        model.next_logits(torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.parametrize(
    ("config", "parameters"),
    # The published counts at GPT-2's vocabulary, plus the rows that pad 50257 to 50304.
    [
        (ModelConfig(n_layer=12, n_head=12, d_model=768, block_size=1024), 124_439_808 + 47 * 768),
        (ModelConfig(n_layer=24, n_head=16, d_model=1024, block_size=1024), 354_823_168 + 47 * 1024),
    ],
)
def test_gpt2_sizes(config, parameters):
    with torch.device("meta"):
        assert GPT(config, 50257).parameter_count() == parameters


def test_causality():
    model = GPT(ModelConfig(n_layer=2, n_head=2, d_model=32, block_size=8), 257).eval()
    tokens = torch.randint(257, (1, 8), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 5:] = 0
    with torch.no_grad():
        before, after = model.hidden(tokens), model.hidden(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)
