"""Shared by the tests: a real config, composed by Hydra from conf/ and shrunk to run in a second."""

import os

# The models here are tiny: a second thread would only wait for the first, and badly so on a busy machine.
os.environ["OMP_NUM_THREADS"] = "1"

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from fusedmlp.config import Config, register
from fusedmlp.launch import CONF
from fusedmlp.schema import load

ROOT = Path(__file__).resolve().parent.parent

SMALL = (
    "model.n_layer=2 model.n_head=2 model.d_model=32 model.block_size=32 trainer.max_steps=20 trainer.batch_size=4 "
    "trainer.log_every=1 trainer.eval_every=10 trainer.eval_steps=2 trainer.save_every=10 trainer.parity_every=10 "
    "optim.warmup_steps=5 tracking=disabled data=files"
).split()


def compose_config(overrides: list[str], name: str = "config", schema: type = Config):
    """What the command line would give, with these overrides."""
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return load(compose(name, overrides=overrides), schema)


def pytest_collection_modifyitems(items):
    """`pytest -m gpu` without a GPU skips, with the reason."""
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="torch sees no CUDA GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture
def corpus(tmp_path_factory) -> Path:
    """A text of about 20 kB: this very file, over and over."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_bytes(Path(__file__).read_bytes() * 8)
    return path


@pytest.fixture
def small(tmp_path, corpus, monkeypatch):
    """``small("key=value", ...)`` gives a config of a run that takes a second, in its own directory."""
    monkeypatch.setenv("FUSEDMLP_CACHE", str(tmp_path / "cache"))

    def make(*overrides: str, run: str = "run") -> Config:
        return compose_config([*SMALL, f"data.files=[{corpus}]", f"run_dir={tmp_path / run}", *overrides])

    return make
