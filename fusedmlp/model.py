"""A GPT-2-shaped transformer: pre-LayerNorm blocks, learned positions, tied head.

Letters: B sequences, T tokens in each, C = d_model, V vocabulary.
"""

import math

from torch import Tensor, nn
from torch.nn import functional as F

from fusedmlp.config import MLPConfig, ModelConfig
from fusedmlp.mlp import FusedMLP, TorchMLP
from fusedmlp.recipes import Options

VOCAB_MULTIPLE = 64  # the head is a GEMM over the vocabulary: an odd width would cost tensor-core efficiency


class Attention(nn.Module):
    """Causal self-attention with torch's ``scaled_dot_product_attention``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=config.bias)
        self.proj = nn.Linear(config.d_model, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        b, t, c = x.shape
        q, k, v = (
            self.qkv(x).view(b, t, 3, self.n_head, c // self.n_head).permute(2, 0, 3, 1, 4)
        )  # 3 x (B, heads, T, .)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    """One transformer block: attention and MLP, each on a normalised copy of the residual stream."""

    def __init__(self, config: ModelConfig, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.d_model, bias=config.bias)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.d_model, bias=config.bias)
        self.mlp = mlp
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """The language model.

    Args:
        config: its shape.
        vocab_size: tokens that exist; the embedding is padded to a multiple of 64 rows, which are never targets.
        mlp: which arm computes the MLPs.

    Both arms draw the same random numbers in the same order, so one seed gives both the same weights.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, mlp: MLPConfig | None = None) -> None:
        super().__init__()
        mlp = mlp or MLPConfig()
        self.config, self.vocab_size = config, vocab_size
        padded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.tokens = nn.Embedding(padded, config.d_model)
        self.positions = nn.Embedding(config.block_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, _mlp(config, mlp)) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.d_model, bias=config.bias)
        self.apply(_initialise)
        # GPT-2: each residual branch adds variance, so their last layers start smaller.
        for name, p in self.named_parameters():
            if name.endswith(("attention.proj.weight", "mlp.fc2.weight")):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer))

    def hidden(self, tokens: Tensor) -> Tensor:
        """(B, T) token ids -> (B, T, C), after the last norm.

        Raises:
            ValueError: T exceeds ``block_size``.
        """
        t = tokens.shape[1]
        if t > self.config.block_size:
            raise ValueError(f"{t} tokens exceed model.block_size={self.config.block_size}")
        x = self.dropout(self.tokens(tokens) + self.positions.weight[:t])
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token of ``targets`` (B, T), the tokens that follow ``tokens`` (B, T)."""
        logits = F.linear(self.hidden(tokens), self.tokens.weight)  # (B, T, padded V)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def next_logits(self, tokens: Tensor, position: int = -1) -> Tensor:
        """(B, T) token ids -> (B, V) logits, fp32, of the token after the one at ``position``."""
        chosen = self.hidden(tokens)[:, position]
        return F.linear(chosen, self.tokens.weight)[:, : self.vocab_size].float()

    def parameter_count(self) -> int:
        """All parameters; the head shares the embedding's."""
        return sum(p.numel() for p in self.parameters())


def options_of(mlp: MLPConfig) -> Options:
    """The execution options that a config asks for."""
    return Options(mlp.engine, mlp.on_unsupported, mlp.search, mlp.compute_type)


def _mlp(config: ModelConfig, mlp: MLPConfig) -> nn.Module:
    shape = (config.d_model, config.hidden, config.activation, config.bias)
    return FusedMLP(*shape, options=options_of(mlp)) if mlp.backend == "fused" else TorchMLP(*shape)


def _initialise(module: nn.Module) -> None:
    """GPT-2's initialisation: N(0, 0.02) for matrices and embeddings, zero for biases."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
