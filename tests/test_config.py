"""The configuration: every group composes, every key is explained, everything wrong is said at once and by name."""

import ast
import logging
import math
import os
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, compose_config
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from fusedmlp import config as config_module
from fusedmlp import launch
from fusedmlp.config import (
    COMPUTE_TYPES,
    BenchConfig,
    Config,
    DataConfig,
    GenerateConfig,
    HubConfig,
    MLPConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrackingConfig,
    TrainerConfig,
)
from fusedmlp.corpus import documents
from fusedmlp.schema import ConfigError, from_dict, load, nearest_key, schema_keys, to_dict

CONF = ROOT / "conf"
SCHEMAS = [
    Config,
    GenerateConfig,
    BenchConfig,
    ModelConfig,
    MLPConfig,
    DataConfig,
    HubConfig,
    OptimConfig,
    TrainerConfig,
    ParallelConfig,
    TrackingConfig,
]
# Options that make no sense without a value of the user's own.
REQUIRED = {("data", "files"): "data.files=[a.txt]", ("data", "hub"): "data.hub.path=roneneldan/TinyStories"}
# The keys that design.md promises to others.
CONTRACT = """
seed device run_dir resume dry_run
model.n_layer model.n_head model.d_model model.d_hidden model.block_size model.activation model.bias model.dropout
mlp.backend mlp.engine mlp.on_unsupported mlp.search mlp.compute_type mlp.plan_store
data.source data.files data.hub data.text_column data.tokenizer data.vocab_size data.val_fraction
optim.lr optim.min_lr optim.warmup_steps optim.weight_decay optim.beta1 optim.beta2 optim.grad_clip
trainer.max_steps trainer.batch_size trainer.grad_accum trainer.precision trainer.compile trainer.log_every
trainer.eval_every trainer.eval_steps trainer.save_every trainer.keep_last trainer.sample_every trainer.parity_every
parallel.strategy
tracking.wandb tracking.project tracking.entity tracking.group tracking.name tracking.tags
""".split()


def options(group: str) -> list[tuple[str, str]]:
    found = sorted(p.stem for p in (CONF / group).glob("*.yaml"))
    assert found, group
    return [(group, name) for name in found]


# ---------------------------------------------------------------------------------------------------------------------
# Composition


@pytest.mark.parametrize(
    ("group", "name"), [o for g in ("model", "mlp", "data", "parallel", "tracking", "experiment") for o in options(g)]
)
def test_every_option_composes(group, name):
    given = [f"{group}={name}", *([REQUIRED[group, name]] if (group, name) in REQUIRED else [])]
    config = compose_config(given)
    assert isinstance(config, Config)
    written = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    values = to_dict(config)
    for key, value in flatten(written if group == "experiment" else {group: written}).items():
        assert flatten(values)[key] == value, key


def flatten(values: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


@pytest.mark.parametrize(("group", "name"), REQUIRED)
def test_data_without_its_required_value_is_refused(group, name):
    with pytest.raises(ConfigError, match=REQUIRED[group, name].partition("=")[0]):
        compose_config([f"{group}={name}"])


def test_generate_composes(tmp_path):
    config = compose_config([f"checkpoint={tmp_path}", "mlp=torch"], "generate", GenerateConfig)
    assert config == GenerateConfig(checkpoint=str(tmp_path), mlp=MLPConfig(backend="torch"))


def test_the_default_is_the_schema_with_the_default_options():
    assert compose_config([]) == Config()


def test_an_experiment_is_applied_last_and_the_command_line_after_it():
    assert compose_config(["experiment=quick", "model=gpt2_small", "model.n_head=4"]).model.n_layer == 2
    assert compose_config(["experiment=quick", "model.n_layer=3"]).model.n_layer == 3


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda p: p.stem)
def test_experiments_hold_only_deltas(path):
    values = yaml.safe_load(path.read_text())
    base = compose_config([f"{group}={name}" for group, name in override_groups(values)])
    given = flatten({k: v for k, v in values.items() if k != "defaults"})
    assert given
    unchanged = [k for k, v in given.items() if flatten(to_dict(base)).get(k, "missing") == v]
    assert unchanged == []


def override_groups(values: dict) -> list[tuple[str, str]]:
    return [
        (key.removeprefix("override ").strip("/"), value)
        for entry in values.get("defaults", [])
        if isinstance(entry, dict)
        for key, value in entry.items()
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The schema


def test_the_contract_of_design_md():
    assert set(CONTRACT) <= set(schema_keys(Config))


def test_schemas_are_all_here():
    in_module = [c for c in vars(config_module).values() if isinstance(c, type) and is_dataclass(c)]
    assert set(in_module) == set(SCHEMAS)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_key_is_explained(schema):
    tree = ast.parse(Path(config_module.__file__).read_text(encoding="utf-8"))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == schema.__name__).body
    explained = set()
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if is_text and isinstance(after.value.value, str) and after.value.value.strip():
                explained.add(node.target.id)
    sections = {f.name for f in fields(schema) if isinstance(f.type, type) and is_dataclass(f.type)}
    assert {f.name for f in fields(schema)} - sections <= explained  # a section's class explains itself
    assert all(f.type.__doc__ for f in fields(schema) if f.name in sections)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_schemas_have_keywords_and_slots_only(schema):
    with pytest.raises(TypeError):
        schema(1)
    assert schema.__dictoffset__ == 0  # a misspelt attribute cannot be set either


NAN, INF = math.nan, math.inf
BAD = [
    # key, values; each is refused, and the message begins with the key and its value
    (ModelConfig, "model.", "n_layer", [0, -1]),
    (ModelConfig, "model.", "n_head", [0, -2]),
    (ModelConfig, "model.", "d_model", [0, -128, 130]),
    (ModelConfig, "model.", "d_hidden", [0, -1]),
    (ModelConfig, "model.", "block_size", [0]),
    (ModelConfig, "model.", "dropout", [-0.1, 1.0, 2.0, NAN, INF, -INF]),
    (ModelConfig, "model.", "activation", ["swish", "GELU", "", "gelu_tanh"]),
    (MLPConfig, "mlp.", "backend", ["fuse", "nvmath", ""]),
    (MLPConfig, "mlp.", "engine", ["cuda", "nvmth"]),
    (MLPConfig, "mlp.", "on_unsupported", ["raise", "fallbck"]),
    (MLPConfig, "mlp.", "search", ["fast"]),
    (MLPConfig, "mlp.", "compute_type", ["COMPUTE_64F", "compute_32f", ""]),
    (MLPConfig, "mlp.", "plan_store", [""]),
    (HubConfig, "data.hub.", "path", [""]),
    (HubConfig, "data.hub.", "max_documents", [0, -1]),
    (DataConfig, "data.", "source", ["std", "file"]),
    (DataConfig, "data.", "tokenizer", ["byte", "gpt2"]),
    (DataConfig, "data.", "vocab_size", [0, 257, 2**31]),
    (DataConfig, "data.", "val_fraction", [0, 1, -0.5, NAN]),
    (DataConfig, "data.", "synthetic_tokens", [0]),
    (DataConfig, "data.", "cache_dir", [""]),
    (DataConfig, "data.", "text_column", [""]),
    (OptimConfig, "optim.", "lr", [0.0, -1e-3, NAN, INF, -INF]),
    (OptimConfig, "optim.", "min_lr", [-1.0, 1.0, NAN, INF]),
    (OptimConfig, "optim.", "warmup_steps", [-1]),
    (OptimConfig, "optim.", "weight_decay", [-0.1, NAN]),
    (OptimConfig, "optim.", "beta1", [-0.1, 1.0, NAN]),
    (OptimConfig, "optim.", "beta2", [-0.1, 1.0, NAN]),
    (OptimConfig, "optim.", "grad_clip", [-1.0, NAN, INF]),
    *((TrainerConfig, "trainer.", k, [0, -1]) for k in "max_steps batch_size grad_accum log_every eval_steps".split()),
    (TrainerConfig, "trainer.", "keep_last", [0, -1]),
    *((TrainerConfig, "trainer.", k, [-1]) for k in "eval_every save_every sample_every parity_every".split()),
    (TrainerConfig, "trainer.", "precision", ["fp8", "bfloat16", "float32"]),
    (TrainerConfig, "trainer.", "compile", ["true", "on", "max_autotune"]),
    (ParallelConfig, "parallel.", "strategy", ["dpp", "ddp", "fsdp", "none"]),
    (TrackingConfig, "tracking.", "wandb", ["on", "ofline", "true"]),
    (TrackingConfig, "tracking.", "project", [""]),
    (Config, "", "seed", [-1, 2**63]),
    (Config, "", "device", ["gpu", "cuda:", "cuda:x", "cpu:0", "cuda:-1", "", "auto:", "cuda:0:1"]),
    (Config, "", "run_dir", [""]),
    (Config, "", "resume", ["/no/such/place", "None", "none", "", "no"]),
]


@pytest.mark.parametrize(
    ("schema", "prefix", "key", "value"),
    [(s, p, k, v) for s, p, k, values in BAD for v in values],
    ids=[f"{p}{k}={v!r}" for s, p, k, values in BAD for v in values],
)
def test_a_bad_value_is_refused_by_name(schema, prefix, key, value):
    with pytest.raises(ConfigError) as refusal:
        schema(**{key: value})
    mine = [p for p in refusal.value.problems if p.startswith(f"{prefix}{key}")]
    assert mine
    assert repr(value).strip("'") in mine[0] or "is empty" in mine[0]


GOOD = [
    (ModelConfig, {"dropout": 0.0, "n_head": 1, "d_model": 1, "n_layer": 1, "block_size": 1, "d_hidden": 1}),
    (ModelConfig, {"activation": "relu", "bias": False}),
    *((MLPConfig, {"compute_type": name}) for name in (None, *COMPUTE_TYPES)),
    (DataConfig, {"vocab_size": 258, "tokenizer": "bpe"}),
    (DataConfig, {"vocab_size": 151_936, "val_fraction": 0.999}),
    (OptimConfig, {"lr": 1e6, "min_lr": 1e6, "warmup_steps": 0, "grad_clip": 0.0, "weight_decay": 0.0, "beta1": 0.0}),
    (TrainerConfig, {"eval_every": 0, "save_every": 0, "sample_every": 0, "parity_every": 0, "keep_last": 1}),
    *((Config, {"device": d}) for d in ("auto", "cpu", "cuda", "cuda:0", "cuda:15")),
    (Config, {"seed": 0, "resume": "auto", "run_dir": "x"}),
    (Config, {"seed": 2**63 - 1, "resume": "/"}),
]


@pytest.mark.parametrize(("schema", "values"), GOOD, ids=str)
def test_values_at_the_edge_are_taken(schema, values):
    made = schema(**values)
    assert {k: getattr(made, k) for k in values} == values


@pytest.mark.parametrize(
    ("schema", "key", "value", "near"),
    [
        (ModelConfig, "activation", "glu", "gelu"),
        (MLPConfig, "backend", "fussed", "fused"),
        (MLPConfig, "engine", "referense", "reference"),
        (MLPConfig, "search", "mesured", "measured"),
        (MLPConfig, "compute_type", "COMPUTE_32F_FAST_TF23", "COMPUTE_32F_FAST_TF32"),
        (DataConfig, "source", "file", "files"),
        (TrainerConfig, "precision", "fp23", "fp32"),
        (TrainerConfig, "compile", "max_autotune", "max-autotune"),
        (TrackingConfig, "wandb", "ofline", "offline"),
    ],
)
def test_the_nearest_choice_is_suggested(schema, key, value, near):
    with pytest.raises(ConfigError) as refusal:
        schema(**{key: value})
    assert str(refusal.value).endswith(f"did you mean {near}?")


def test_what_does_not_fit_together():
    with pytest.raises(ConfigError, match=r"optim\.warmup_steps=50 exceeds trainer\.max_steps=10"):
        Config(trainer=TrainerConfig(max_steps=10), optim=OptimConfig(warmup_steps=50))
    with pytest.raises(ConfigError, match=r"model\.d_model=130 must be a multiple of model\.n_head=4"):
        ModelConfig(d_model=130, n_head=4)
    with pytest.raises(ConfigError, match=r"optim\.min_lr=0\.1 is above optim\.lr=0\.01"):
        OptimConfig(lr=0.01, min_lr=0.1)
    with pytest.raises(ConfigError, match=r"data\.tokenizer=bpe has no text to learn from"):
        DataConfig(source="synthetic", tokenizer="bpe")
    with pytest.raises(ConfigError, match="write resume=null to start anew"):
        Config(resume="None")


def test_hidden_width():
    assert ModelConfig(d_model=64).hidden == 256
    assert ModelConfig(d_model=64, d_hidden=100).hidden == 100


# ---------------------------------------------------------------------------------------------------------------------
# All at once


def problems_of(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        compose_config(list(overrides))
    return refusal.value.problems


def test_unset_values_and_broken_references_are_listed_together():
    found = problems_of("seed=???", "optim.lr=???", "tracking.name=${nope}", "data.hub.name=${data.hub.pth}")
    assert len(found) == 4
    starts = "seed is not set", "optim.lr is not set; give it as optim.lr=VALUE", "tracking.name: ", "data.hub.name: "
    for start in starts:
        assert len([p for p in found if p.startswith(start)]) == 1, start
    assert any("'nope' not found" in p for p in found)


def test_all_sections_are_checked_together():
    found = problems_of("model.activation=swish", "optim.lr=-1", "optim.beta1=2", "data.hub.max_documents=0")
    for key in ("model.activation", "optim.lr", "optim.beta1", "data.hub.max_documents"):
        assert len([p for p in found if p.startswith(f"{key}=")]) == 1, key


def test_everything_wrong_with_one_section_is_listed():
    with pytest.raises(ConfigError) as refusal:
        TrainerConfig(max_steps=0, eval_every=-1, precision="fp8", compile="on")
    assert [p.partition("=")[0] for p in refusal.value.problems] == [
        f"trainer.{k}" for k in ("max_steps", "eval_every", "precision", "compile")
    ]
    assert str(refusal.value).splitlines() == refusal.value.problems


def test_references_are_resolved():
    config = compose_config(["tracking.name=${model.d_model}-${seed}", "optim.min_lr=${optim.lr}"])
    assert config.tracking.name == f"{config.model.d_model}-{config.seed}"
    assert config.optim.min_lr == config.optim.lr


def test_a_dict_config_does_not_travel_inward():
    config = compose_config(["tracking.tags=[a,b]", "data.files=[x,y]"])
    assert type(config.tracking.tags) is type(config.data.files) is list
    assert all(type(getattr(config, f.name)) is f.type for f in fields(Config) if is_dataclass(f.type))


# ---------------------------------------------------------------------------------------------------------------------
# Dicts, and unknown keys


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["experiment=quick", "tracking.tags=[a,b]", "tracking.name=x"],
        ["data=hub", "data.hub.path=a/b", "data.hub.max_documents=7", "model=gpt2_xl", "mlp=torch"],
        ["data=files", "data.files=[a.txt,'b c.jsonl']", "model.d_hidden=99", "resume=auto"],
    ],
    ids=str,
)
def test_round_trip(overrides):
    config = compose_config(overrides)
    values = to_dict(config)
    assert from_dict(values, Config) == config
    assert from_dict(yaml.safe_load(yaml.safe_dump(values)), Config) == config  # plain enough for any YAML reader
    assert OmegaConf.to_container(OmegaConf.create(values)) == values
    assert sorted(flatten(values)) == sorted(k for k in schema_keys(Config) if not any_below(k))


def any_below(key: str) -> bool:
    return any(k.startswith(key + ".") for k in schema_keys(Config))


def test_to_dict_is_a_copy():
    config = Config()
    to_dict(config)["tracking"]["tags"].append("x")
    to_dict(config)["model"]["n_layer"] = 77
    assert config == Config()


def test_from_dict_fills_in_what_is_missing():
    assert from_dict({}, Config) == Config()
    assert from_dict({"model": {"n_layer": 7}}, Config).model == ModelConfig(n_layer=7)


def test_from_dict_refuses_unknown_keys_all_at_once():
    values = {"model": {"n_layers": 3}, "data": {"hub": {"pth": "x"}}, "optm": {}, "optim": {"lr": -1}}
    with pytest.raises(ConfigError) as refusal:
        from_dict(values, Config)
    assert sorted(refusal.value.problems)[:3] == [
        "data.hub.pth is not a config key; did you mean data.hub.path?",
        "model.n_layers is not a config key; did you mean model.n_layer?",
        "optim.lr=-1 must be > 0",
    ]
    assert "optm is not a config key; did you mean optim?" in refusal.value.problems


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("optim.lrr", "optim.lr"),
        ("optim.Lr", "optim.lr"),
        ("OPTIM.LR", "optim.lr"),
        ("lr", "optim.lr"),
        ("batch_size", "trainer.batch_size"),
        ("max_step", "trainer.max_steps"),
        ("model.nlayer", "model.n_layer"),
        ("data.hub.pth", "data.hub.path"),
        ("sed", "seed"),
        ("zzz", None),
        ("qqq.xxxxxxxx", None),
    ],
)
def test_nearest_key(key, near):
    assert nearest_key(key, Config) == near


def test_nearest_key_of_another_schema():
    assert nearest_key("temprature", GenerateConfig) == "temperature"
    assert nearest_key("temprature", Config) is None


def test_load_takes_what_was_composed_with_the_schema_only():
    cfg = OmegaConf.structured(Config)
    assert load(cfg, Config) == Config()


# ---------------------------------------------------------------------------------------------------------------------
# The command


def train_command(tmp_path: Path, *arguments: str, torch: bool = False, cwd: Path | None = None):
    """train.py in a process of its own, in which importing torch fails unless ``torch``."""
    code = "import runpy, sys; path = sys.argv.pop(1); sys.argv[0] = path\n"
    code += "" if torch else "sys.modules['torch'] = None\n"
    code += "runpy.run_path(path, run_name='__main__')"
    environment = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"}
    environment |= {"FUSEDMLP_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "train.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd or tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("optim.lrr=1", "optim.lrr is not a config key; did you mean optim.lr?"),
        ("+optim.lrr=1", "optim.lrr is not a config key; did you mean optim.lr?"),
        ("++optim.Lr=5", "optim.Lr is not a config key; did you mean optim.lr?"),
        ("optim.lr=", "optim.lr: Value '' of type 'str' could not be converted to Float"),
        ("resume=None", "resume='None': no such file or directory; write resume=null to start anew"),
        ("optim.lr=nan", "optim.lr=nan is not a finite number"),
        ("trainer.max_steps=1e2", "trainer.max_steps: Value '100.0' of type 'float' could not be converted to Integer"),
        ("optim.lr=banana", "optim.lr: Value 'banana' of type 'str' could not be converted to Float"),
        ("--local-rank=0", "use torchrun"),
    ],
)
def test_refused_with_status_2_before_torch_and_data(tmp_path, argument, said):
    done = train_command(tmp_path, argument)
    assert done.returncode == 2, done.stderr
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("config error: ")]
    assert said in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "cache").exists()


def test_several_problems_are_a_line_each(tmp_path):
    done = train_command(tmp_path, "seed=???", "optim.lr=???", "tracking.name=${nope}")
    assert done.returncode == 2
    lines = [x for x in done.stderr.splitlines() if x.startswith("config error: ")]
    assert [x.split()[2].rstrip(":") for x in lines] == ["seed", "optim.lr", "tracking.name"]


def test_help_and_cfg_need_no_torch(tmp_path):
    shown = train_command(tmp_path, "--cfg", "job", "optim.lr=0.5")
    assert shown.returncode == 0, shown.stderr
    values = yaml.safe_load(shown.stdout)
    assert values["optim"]["lr"] == 0.5
    assert sorted(flatten(values)) == sorted(flatten(to_dict(Config())))
    help_text = train_command(tmp_path, "--help")
    assert help_text.returncode == 0, help_text.stderr
    for group in ("model", "mlp", "data", "parallel", "tracking", "experiment"):
        names = ", ".join(name for _, name in options(group))
        assert f"{group}: {names}\n" in help_text.stdout
    assert os.listdir(tmp_path) == []


def test_a_dry_run_reads_relative_files_from_where_it_was_started(tmp_path):
    start = tmp_path / "elsewhere"
    start.mkdir()
    (tmp_path / "my.txt").write_bytes(Path(__file__).read_bytes())
    (start / "my.txt").write_text("the wrong file")
    done = train_command(
        tmp_path,
        "hydra.job.chdir=true",
        "dry_run=true",
        "trainer.max_steps=77",
        "data=files",
        "data.files=[../my.txt]",
        f"run_dir={tmp_path / 'run'}",
        torch=True,
        cwd=start,
    )
    assert done.returncode == 0, done.stderr
    printed = [line.removeprefix("reading ") for line in done.stderr.splitlines() if line.startswith("reading ")]
    assert [Path(p).resolve() for p in printed] == [tmp_path / "my.txt"]
    assert "max_steps: 77\n" in done.stdout


@pytest.fixture
def command(monkeypatch, tmp_path):
    """``command("key=value", ...)`` runs ``launch.main`` in this process: the configs that its task received."""
    level, handlers = logging.root.level, list(logging.root.handlers)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # as launch.main sets it; restored afterwards

    def run(*arguments: str, task=None) -> list[tuple[Config, str, list[str]]]:
        received = []

        def default(config):
            paths = list(documents(config.data).paths) if config.data.source == "files" else []
            received.append((config, os.getcwd(), paths))

        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        launch.main("config", Config, task or default)
        return received

    yield run
    GlobalHydra.instance().clear()
    for handler in set(logging.root.handlers) - set(handlers):
        handler.close()
    logging.root.handlers, logging.root.level = handlers, level


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_relative_paths_do_not_depend_on_chdir(command, tmp_path, monkeypatch, chdir):
    (tmp_path / "my.txt").write_text("text")
    start = tmp_path / "elsewhere"
    start.mkdir()
    monkeypatch.chdir(start)
    ((config, cwd, paths),) = command(f"hydra.job.chdir={chdir}", "data=files", "data.files=[../my.txt]")
    assert Path(cwd) == start
    assert [Path(p).resolve() for p in paths] == [tmp_path / "my.txt"]
    assert config.data.files == ["../my.txt"]


def test_a_run_directory_is_made_up_and_given_ones_are_kept(command, tmp_path):
    ((config, _, _),) = command()
    assert Path(config.run_dir).parent == tmp_path / "runs"
    ((config, _, _),) = command("run_dir=mine")
    assert Path(config.run_dir).absolute() == tmp_path / "mine"


def test_made_up_run_directories_differ_within_a_second():
    names = {launch._new_run_dir.__wrapped__() for _ in range(20)}
    assert len(names) > 18  # of 65536 suffixes; two pairs alike would be one chance in a hundred thousand
    assert launch._new_run_dir() == launch._new_run_dir()  # but a process has one


def test_status_1_of_a_run_that_explains_its_failure(command, capsys):
    def fail(config):
        raise launch.RunFailed("the loss is nan")

    with pytest.raises(SystemExit) as leaving:
        command(task=fail)
    assert leaving.value.code == 1
    captured = capsys.readouterr()
    assert "error: the loss is nan" in captured.err
    assert "Traceback" not in captured.err


def test_a_config_error_of_the_task_is_status_2(command, capsys):
    def refuse(config):
        raise ConfigError(["a is wrong", "b is wrong"])

    with pytest.raises(SystemExit) as leaving:
        command(task=refuse)
    assert leaving.value.code == 2
    assert capsys.readouterr().err.splitlines()[-2:] == ["config error: a is wrong", "config error: b is wrong"]


def test_other_errors_are_not_hidden(command):
    with pytest.raises(ZeroDivisionError):
        command(task=lambda config: 1 / 0)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("modle=tiny", "modle is not a config key; did you mean model?"),
        ("model=huge", "model/huge"),
        ("lr=1", "lr is not a config key; did you mean optim.lr?"),
        ("optim=3", "optim: "),
        ("optim=null", "optim"),
        ("model.n_layer=null", "model.n_layer"),
        ("optim.lr=${oops}", "optim.lr: Interpolation key 'oops' not found"),
        ("dry_run=maybe", "dry_run: Value 'maybe' is not a valid bool"),
        ("tracking.tags=one", "tracking.tags is a list: write tracking.tags=[A,B]"),
        ("seed", "'seed'"),
        ("device=gpu", "device='gpu' is not one of auto, cpu, cuda, cuda:N"),
        ("mlp.engine=nvmth", "did you mean nvmath?"),
    ],
)
def test_other_mistakes_on_the_command_line(command, capsys, argument, said):
    with pytest.raises(SystemExit) as leaving:
        command(argument)
    assert leaving.value.code == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("config error: ")]
    assert said in line


def test_a_missing_conf_folder_is_explained(command, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "CONF", tmp_path / "nowhere")
    with pytest.raises(SystemExit) as leaving:
        command()
    assert leaving.value.code == 2
    assert "pip install -e ." in capsys.readouterr().err
