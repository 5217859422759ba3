"""From a model and a prompt to more tokens: the sampling loop, one whole forward pass for each token."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedmlp.model import GPT


def choose(logits: Tensor, *, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> Tensor:
    """One token for each row of ``logits`` (B, V) -> (B, 1).

    Args:
        logits: fp32.
        temperature: 0 takes the most likely token; higher flattens the distribution.
        top_k: keep the k most likely tokens; 0 keeps all, more than V means V.
        top_p: keep the most likely tokens until their probabilities sum to ``top_p``; at least one stays.
        generator: the source of randomness, on the device of ``logits``.
    """
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    # Relative to the largest, so that a tiny temperature gives -inf and not inf.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    if top_k:
        ordered[:, top_k:] = -torch.inf
    probabilities = ordered.softmax(dim=-1)
    if top_p < 1:
        before = probabilities.cumsum(dim=-1) - probabilities  # probability mass in front of each token
        probabilities = probabilities.masked_fill(before >= top_p, 0)  # before the first token it is 0, which stays
    return ids.gather(1, torch.multinomial(probabilities, 1, generator=generator))


def bucket(length: int) -> int:
    """``length`` rounded up to a power of two, at least 32: a few shapes instead of one for each length."""
    return max(32, 1 << (length - 1).bit_length())


@torch.no_grad()
def extend(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
) -> Tensor:
    """Append up to ``max_new_tokens`` tokens to ``tokens`` (1, T), T >= 1, and return all of them (1, T + new).

    Beyond ``block_size`` the model sees the last ``block_size`` tokens. Generation ends early at the token ``stop``,
    which is not appended. Randomness comes from ``seed`` alone: torch's global generators are left as they are.
    """
    generator = torch.Generator(device=tokens.device).manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            window = tokens[:, -model.config.block_size :]
            length = window.shape[1]
            # A length that changes with every token would want new plans with every token. Attention is causal, so
            # padding behind the last token changes nothing before it.
            padded = F.pad(window, (0, min(bucket(length), model.config.block_size) - length))
            logits = model.next_logits(padded, length - 1)
            token = choose(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
            if stop is not None and token.item() == stop:
                break
            tokens = torch.cat((tokens, token), dim=1)
    finally:
        model.train(was_training)
    return tokens
