"""Continues a prompt: ``python -m fusedmlp.generate checkpoint=RUN prompt="def "``."""

import logging
from pathlib import Path

import torch

from fusedmlp import checkpoint, tokenizer
from fusedmlp.config import GenerateConfig, MLPConfig, ModelConfig
from fusedmlp.device import autocast, resolve_device, resolve_precision
from fusedmlp.launch import main
from fusedmlp.model import GPT
from fusedmlp.sampling import extend
from fusedmlp.schema import from_dict

log = logging.getLogger(__name__)


def load_model(path: Path, mlp: MLPConfig, device: torch.device) -> tuple[GPT, "tokenizer.Tokenizer"]:
    """Model and tokenizer of a checkpoint, whichever arm and device trained it.

    Raises:
        ConfigError: there is no sound checkpoint.
    """
    saved = checkpoint.load(checkpoint.find(path, best=True))
    text = tokenizer.from_dict(saved["tokenizer"])
    model = GPT(from_dict(saved["config"]["model"], ModelConfig), text.vocab_size, mlp)
    model.load_state_dict(saved["model"])
    return model.to(device).eval(), text


def generate(config: GenerateConfig) -> str:
    """The prompt and its continuation. Bytes that are no valid UTF-8 are shown as the replacement character."""
    device = resolve_device(config.device)
    model, text = load_model(Path(config.checkpoint).expanduser(), config.mlp, device)
    ids = text.encode([config.prompt.encode("utf-8", "surrogateescape")])[0].tolist()
    tokens = torch.tensor([[text.eod, *ids]], device=device)  # as in training, a document follows the end of another
    if tokens.shape[1] + config.max_new_tokens > model.config.block_size:
        log.warning("beyond %d tokens the model sees only the last %d", *[model.config.block_size] * 2)
    with autocast(device, resolve_precision(config.precision, device)):
        tokens = extend(
            model,
            tokens,
            config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=config.seed,
            stop=text.eod,
        )
    return text.decode(tokens[0, 1:].tolist())


def run(config: GenerateConfig) -> None:
    """Print the generated text."""
    print(generate(config))


if __name__ == "__main__":
    main("generate", GenerateConfig, run)
