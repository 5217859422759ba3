"""What environment.describe says, and that nothing missing makes it raise."""

import datetime
import json
import socket
import subprocess
from pathlib import Path

import pytest
import torch

from fusedmlp import environment

VERSIONS = {"python", "torch", "cuda", "driver", "cublaslt", "nvmath", "triton", "commit"}
KEYS = VERSIONS | {"platform", "cpu", "gpu", "sm_count", "date"}


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
    command = ["git", "-C", str(directory), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "fusedmlp").mkdir()
    (tmp_path / "fusedmlp" / "__init__.py").write_text("")
    (tmp_path / "README.md").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_cpu_description_is_json_with_every_key_and_no_host_name():
    found = environment.describe(torch.device("cpu"), cublaslt_version=130200)
    assert set(found) == KEYS
    assert found["torch"] == str(torch.__version__)
    assert found["cublaslt"] == 130200
    assert found["gpu"] is found["sm_count"] is found["driver"] is None
    assert datetime.datetime.fromisoformat(found["date"]).utcoffset() == datetime.timedelta(0)
    assert json.loads(json.dumps(found)) == found
    assert socket.gethostname() not in (found["platform"], found["cpu"])


def test_nothing_found_is_null_not_an_error(monkeypatch):
    def missing(*_, **__):
        raise OSError("not here")

    monkeypatch.setattr(environment.subprocess, "run", missing)
    monkeypatch.setattr(environment.importlib.metadata, "version", missing)
    monkeypatch.setattr(environment.Path, "read_text", missing)
    monkeypatch.setattr(environment.platform, "platform", missing)
    found = environment.describe("no such device")
    assert set(found) == KEYS
    missed = {key for key, value in found.items() if value is None}
    assert missed >= {"platform", "cpu", "gpu", "sm_count", "driver", "cublaslt", "nvmath", "triton", "commit"}


def test_a_hanging_nvidia_smi_gives_no_driver(monkeypatch):
    def hang(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(environment.subprocess, "run", hang)
    assert environment._or_none(environment._driver) is None


def test_commit_names_the_checkout_and_marks_changed_code_only(checkout):
    package, head = checkout / "fusedmlp", git(checkout, "rev-parse", "HEAD")
    assert environment.commit(package) == head
    (checkout / "README.md").write_text("changed")
    (checkout / "results.json").write_text("{}")
    assert environment.commit(package) == head  # texts and results do not change what runs
    (package / "new.py").write_text("")
    assert environment.commit(package) == head + "+dirty"
    (package / "new.py").unlink()
    (package / "__init__.py").write_text("x = 1")
    assert environment.commit(package) == head + "+dirty"


def test_no_commit_outside_a_checkout_or_inside_a_foreign_one(checkout, tmp_path_factory):
    alone = tmp_path_factory.mktemp("alone")
    assert environment.commit(alone) is None
    installed = checkout / "venv" / "fusedmlp"  # a virtual environment inside some other project's checkout
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert environment.commit(installed) is None


@pytest.mark.gpu
def test_gpu_description():
    found = environment.describe("cuda")
    assert found["gpu"] == torch.cuda.get_device_name()
    assert found["sm_count"] > 0
    assert found["driver"].count(".") >= 1
