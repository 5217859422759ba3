"""Trains one model: ``python train.py [key=value ...]``; ``--help`` and ``--cfg job`` show the config."""

from fusedmlp.config import Config
from fusedmlp.launch import main


def run(config: Config) -> float | None:
    """Train, and return the best validation loss: what a hyperparameter sweep minimises."""
    # Imported here so that a bad config is refused before torch has loaded.
    from fusedmlp.trainer import train

    return train(config)["best_val_loss"]


if __name__ == "__main__":
    main("config", Config, run)
