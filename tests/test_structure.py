"""The cut of the code: one-way arrows between rooms, one door for each library, no torch where none is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "fusedmlp"
# In dependency order: a room imports only rooms above it. A new file must find its place here.
ROOMS = (
    "schema config files launch environment store "
    "epilogs plans gemms kernels stages race recipes ops mlp model "
    "tokenizer corpus prepare data "
    "device optim metrics signals "
    "wandb_run tracking checkpoint state "
    "sampling trainer generate "
    "timing mlp_arms bench_report bench_mlp bench_gemm bench_precision bench_host plots bench"
).split()
# The rooms that a config passes through before torch is worth its second.
WITHOUT_TORCH = "schema config launch files tokenizer corpus prepare wandb_run tracking signals".split()
DOORS = {
    "nvmath": "plans",
    "wandb": "wandb_run",
    "datasets": "corpus",
    "tokenizers": "tokenizer",
    "hydra": "config launch",
    "filelock": "prepare store",
    "triton": "kernels",
    "matplotlib": "plots",
}
TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "conf", "fusedmlp", "train.py", "tests", "docs"}


def source(room: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{room}.py").read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> set[str]:
    """Dotted names of all that is imported, inside functions too; ``from fusedmlp import a`` counts as fusedmlp.a."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which room is meant"
            assert node.module
            if node.module == "fusedmlp":
                found |= {f"fusedmlp.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return found


def libraries(room: str) -> set[str]:
    return {name.partition(".")[0] for name in imports(source(room))}


def test_every_file_has_its_place():
    files = sorted(p.relative_to(PACKAGE).with_suffix("").as_posix() for p in PACKAGE.rglob("*.py"))
    assert files == sorted([*ROOMS, "__init__"])


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_one_way(room):
    used = {name.split(".")[1] for name in imports(source(room)) if name.startswith("fusedmlp.")}
    assert used <= set(ROOMS[: ROOMS.index(room)])


def test_the_package_itself_imports_no_room():
    assert not [name for name in imports(source("__init__")) if name.startswith("fusedmlp")]


def test_the_import_finder_sees_what_it_should():
    code = (
        "import a.b\ndef f():\n    from fusedmlp import c, d\n    from fusedmlp.e import x\nif 1:\n    from g import h"
    )
    assert imports(ast.parse(code)) == {"a.b", "fusedmlp.c", "fusedmlp.d", "fusedmlp.e", "g"}


@pytest.mark.parametrize("library", DOORS)
def test_a_library_enters_through_one_door(library):
    assert [room for room in sorted(ROOMS) if library in libraries(room)] == sorted(DOORS[library].split())


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_rooms_without_torch(room):
    used = {name.split(".")[1] for name in imports(source(room)) if name.startswith("fusedmlp.")}
    assert "torch" not in libraries(room)
    assert used <= set(WITHOUT_TORCH)  # nor through another room


def test_config_loads_without_torch():
    code = f"""
import sys
sys.modules["torch"] = None  # any import of it raises
import fusedmlp
for room in {WITHOUT_TORCH}:
    __import__("fusedmlp." + room)
assert "wandb" not in sys.modules
assert "datasets" not in sys.modules
fusedmlp.config.Config()
print(sorted(m for m in sys.modules if m.startswith("fusedmlp.")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(sorted(f"fusedmlp.{room}" for room in WITHOUT_TORCH))


def test_public_names_come_from_their_rooms():
    import fusedmlp
    from fusedmlp.mlp import FusedMLP, TorchMLP, fused_mlp
    from fusedmlp.model import GPT

    assert [getattr(fusedmlp, name) for name in fusedmlp.__all__] == [GPT, FusedMLP, TorchMLP, fused_mlp]
    with pytest.raises(AttributeError, match="'fusedmlp' has no attribute 'fused_mpl'"):
        _ = fusedmlp.fused_mpl


@pytest.mark.parametrize("path", [*sorted(PACKAGE.glob("*.py")), ROOT / "train.py"], ids=lambda p: p.name)
def test_a_file_says_what_it_is_about(path: Path):
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring
    first, *rest = docstring.splitlines()
    assert first.endswith((".", ":"))
    assert not rest or not rest[0]  # a summary is one line


def test_top_level_holds_what_is_agreed():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    top = {Path(line).parts[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == TOP_LEVEL


def test_the_entry_point_is_short():
    assert len((ROOT / "train.py").read_text(encoding="utf-8").splitlines()) < 50
