"""Sampling and generation: the token that is chosen, and text that continues any prompt."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, compose_config
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedmlp import checkpoint, recipes
from fusedmlp.config import GenerateConfig, MLPConfig, ModelConfig
from fusedmlp.generate import generate, load_model
from fusedmlp.model import GPT
from fusedmlp.sampling import choose, extend
from fusedmlp.schema import ConfigError
from fusedmlp.trainer import train

CPU = torch.device("cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pick(logits, temperature=1.0, top_k=0, top_p=1.0, seed=0) -> torch.Tensor:
    logits = torch.as_tensor(logits, dtype=torch.float32)
    return choose(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator(seed))


# ---------------------------------------------------------------------------------------------------------------------
# One token


@pytest.mark.parametrize(
    "how",
    [{"temperature": 0}, {"temperature": 0, "top_k": 3, "top_p": 0.1}, {"top_k": 1}, {"top_p": 1e-6}, {"top_p": 1e-30}],
    ids=str,
)
def test_ways_to_say_the_most_likely(how):
    logits = torch.randn(200, 50, generator=generator())
    token = pick(logits, **how)
    assert token.shape == (200, 1)
    assert torch.equal(token[:, 0], logits.argmax(dim=1))


def test_of_equal_logits_greedy_takes_the_first():
    assert pick([[1.0, 3.0, 3.0, 3.0]], temperature=0).item() == 1
    assert pick([[1.0, 3.0, 3.0, 3.0]], top_k=1).item() == 1


@pytest.mark.parametrize("top_k", [0, 8, 9, 1000])
def test_top_k_of_the_whole_vocabulary_is_off(top_k):
    logits = torch.randn(1, 8, generator=generator()).expand(3000, 8)
    token = pick(logits, top_k=top_k)
    assert torch.equal(token, pick(logits, top_k=0))
    assert set(token.flatten().tolist()) == set(range(8))  # each has at least 1 in 100, and there are 3000 draws


DRAWS = 20_000


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.7)]
)
def test_frequencies_are_those_of_the_softmax(temperature, top_k, top_p):
    logits = np.array([0.5, -1.0, 2.0, 0.0, 1.5, -3.0])
    p = np.exp(logits / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
    if top_p < 1:
        kept = 1 + np.searchsorted(np.cumsum(p[order]), top_p)  # as many as it takes to reach top_p
        p[order[kept:]] = 0
    p /= p.sum()
    tokens = pick(torch.tensor(logits).expand(DRAWS, -1), temperature, top_k, top_p)
    seen = np.bincount(tokens.flatten().numpy(), minlength=6) / DRAWS
    # Five standard deviations of a binomial share: one seed in about 300,000 would fail, and this one is fixed.
    assert (np.abs(seen - p) <= 5 * np.sqrt(p * (1 - p) / DRAWS)).all()
    assert not seen[p == 0].any()


@settings(max_examples=200)
@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12),
    temperature=st.floats(0.05, 10),
    top_k=st.integers(0, 15),
    top_p=st.floats(0.01, 1),
    seed=st.integers(0, 2**31),
)
def test_the_token_is_one_of_those_that_are_allowed(logits, temperature, top_k, top_p, seed):
    token = pick([logits] * 8, temperature, top_k, top_p, seed)
    scaled = np.array(logits, dtype=np.float64) / temperature
    largest = np.sort(scaled)[::-1][: top_k or None]
    weights = np.exp(largest - largest[0])
    # fp32: the quotient of 20 and 0.05 is rounded by 2e-5, and a probability by that share of itself
    slack = 1e-4
    for i in token.flatten().tolist():
        assert scaled[i] >= largest[-1] - slack  # of equals at the edge, any may have been the k-th
        before = weights[largest > scaled[i] + slack].sum() / weights.sum()
        assert before < top_p + slack


def test_rows_are_drawn_one_by_one():
    logits = torch.full((4, 4), -torch.inf).fill_diagonal_(0.0)
    assert pick(logits).flatten().tolist() == [0, 1, 2, 3]


# ---------------------------------------------------------------------------------------------------------------------
# Many tokens


class Counting:
    """A model that says: one more than the last token; and notes what it was shown."""

    def __init__(self, block_size=4, vocab=10):
        self.config, self.vocab, self.training = SimpleNamespace(block_size=block_size), vocab, True
        self.shown: list[list[int]] = []
        self.widths: set[int] = set()

    def train(self, mode=True):
        self.training = mode

    def eval(self):
        self.training = False

    def next_logits(self, tokens, position=-1):
        assert not self.training
        assert not torch.is_grad_enabled()
        assert tokens.shape[1] <= self.config.block_size
        position %= tokens.shape[1]
        self.widths.add(tokens.shape[1])
        self.shown.append(tokens[0, : position + 1].tolist())  # behind it is padding, which causal attention ignores
        logits = torch.full((1, self.vocab), -1e9)
        logits[0, (tokens[0, position] + 1) % self.vocab] = 0.0
        return logits


def test_tokens_are_appended():
    assert extend(Counting(), torch.tensor([[3, 5]]), 3).tolist() == [[3, 5, 6, 7, 8]]
    given_tokens = torch.tensor([[1]])
    assert extend(Counting(), given_tokens, 0).tolist() == [[1]]
    extend(Counting(), given_tokens, 2)
    assert given_tokens.tolist() == [[1]]


def test_the_stop_token_ends_and_is_left_out():
    model = Counting()
    assert extend(model, torch.tensor([[3]]), 50, stop=7).tolist() == [[3, 4, 5, 6]]
    assert len(model.shown) == 4
    assert extend(Counting(), torch.tensor([[7]]), 2, stop=7).tolist() == [[7, 8, 9]]  # a prompt may hold it


def test_the_window_slides():
    model = Counting(block_size=3)
    assert extend(model, torch.tensor([[0, 1]]), 4).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert model.shown == [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    model = Counting(block_size=2)
    extend(model, torch.tensor([[5, 6, 7, 8]]), 1)
    assert model.shown == [[7, 8]]


def test_few_shapes_are_asked_for():
    model = Counting(block_size=100, vocab=300)
    extend(model, torch.tensor([[0]]), 250)
    assert len(model.widths) <= 4  # each new shape would want new plans
    assert [len(s) for s in model.shown] == [min(i, 100) for i in range(1, 251)]


def test_padding_does_not_change_what_is_generated():
    model = GPT(ModelConfig(n_layer=2, n_head=2, d_model=16, block_size=48), 60).double().eval()
    tokens = torch.tensor([[7]])
    for _ in range(60):
        with torch.no_grad():  # the last token of an unpadded window
            token = model.next_logits(tokens[:, -48:]).argmax(dim=-1, keepdim=True)
        tokens = torch.cat((tokens, token), dim=1)
    assert extend(model, torch.tensor([[7]]), 60, temperature=0).tolist() == tokens.tolist()


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_restored(training):
    model = Counting()
    model.train(training)
    extend(model, torch.tensor([[0]]), 2)
    assert model.training == training
    gpt = GPT(ModelConfig(n_layer=1, n_head=1, d_model=8, block_size=8, dropout=0.5), 20).train(training)
    extend(gpt, torch.tensor([[0]]), 2)
    assert all(m.training == training for m in gpt.modules())


def test_randomness_comes_from_the_seed_alone():
    model = GPT(ModelConfig(n_layer=1, n_head=1, d_model=8, block_size=8, dropout=0.5), 200)
    start = torch.tensor([[1]])

    def sample(seed):
        return extend(model, start, 30, temperature=1.0, top_k=0, seed=seed).tolist()

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = sample(5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert sample(5) == first
    assert sample(6) != first


# ---------------------------------------------------------------------------------------------------------------------
# From a run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run of 40 steps, best checkpoint at the end or before it, on the sources of this project."""
    root = tmp_path_factory.mktemp("generate")
    text = root / "text.txt"
    text.write_bytes(b"".join(p.read_bytes() for p in sorted((ROOT / "fusedmlp").glob("*.py"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDMLP_CACHE", str(root / "cache"))
        overrides = ["trainer.max_steps=40", "trainer.keep_last=10", f"data.files=[{text}]", f"run_dir={root / 'run'}"]
        train(compose_config([*SMALL, *overrides]))
    return root / "run"


def config(run_dir: Path, *overrides: str, prompt: str = "", **values) -> GenerateConfig:
    c = compose_config([f"checkpoint={run_dir}", "max_new_tokens=40", *overrides], "generate", GenerateConfig)
    c.prompt = prompt  # not through the grammar of the command line
    for key, value in values.items():
        setattr(c, key, value)
    return c


PROMPTS = {
    "words": "def forward(self, x):\n    ",
    "empty": "",
    "blank": " \n\t",
    "emoji": "😀👩‍👩‍👧 ",
    "accents": "Ça a été très fâcheux: naïve, Åse, Straße, дом, 你好 ",
    "end of document in words": "<|endoftext|>",
    "longer than block_size": "import torch\n" * 20,
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_text_continues_the_prompt(run_dir, prompt):
    text = generate(config(run_dir, prompt=prompt, temperature=1.0))
    assert text.startswith(prompt)
    assert len(text) > len(prompt)  # the corpus has one end of document in 160 kB: none is drawn here
    assert generate(config(run_dir, prompt=prompt, temperature=1.0)) == text
    assert generate(config(run_dir, prompt=prompt, temperature=1.0, seed=3)) != text


def test_a_prompt_beyond_the_window_is_said_once(run_dir, caplog):
    generate(config(run_dir, prompt=PROMPTS["longer than block_size"]))
    said = [r.getMessage() for r in caplog.records if "beyond" in r.getMessage()]
    assert said == ["beyond 32 tokens the model sees only the last 32"]
    caplog.clear()
    generate(config(run_dir, "max_new_tokens=5", prompt="short"))
    assert not [r for r in caplog.records if "beyond" in r.getMessage()]


def test_number_of_new_tokens(run_dir):
    model, text = load_model(run_dir, MLPConfig(), CPU)
    assert text.vocab_size == model.vocab_size == 257
    for count in (0, 1, 7):
        out = generate(config(run_dir, prompt="abc", max_new_tokens=count, temperature=0.0))
        assert len(out.encode()) == 3 + count  # greedy continues this corpus in ASCII: a byte each


def test_a_stop_in_mid_character_is_a_replacement_character(run_dir, monkeypatch):
    half = torch.tensor([[256, *"é😀".encode()[:4]]])  # two of the emoji's four bytes
    monkeypatch.setattr("fusedmlp.generate.extend", lambda *args, **kwargs: half)
    assert generate(config(run_dir)) == "é\ufffd"


def test_both_arms_write_the_same(run_dir):
    texts = {
        (backend, engine): generate(
            config(run_dir, f"mlp={backend}", f"mlp.engine={engine}", prompt="class ", temperature=0.0)
        )
        for backend, engine in (("torch", "auto"), ("fused", "auto"), ("fused", "reference"))
    }
    assert len(set(texts.values())) == 1
    assert all(len(t) > 6 for t in texts.values())


def test_both_arms_give_the_same_logits(run_dir):
    tokens = torch.tensor([list(b"def forward(self, x):\n")])
    fused, plain = (load_model(run_dir, MLPConfig(backend=b), CPU)[0] for b in ("fused", "torch"))
    with torch.no_grad():
        # fp32, and the reference engine calls the kernels that torch's linear calls
        torch.testing.assert_close(fused.next_logits(tokens), plain.next_logits(tokens), rtol=1e-6, atol=1e-6)


def test_generation_keeps_nothing_for_a_backward_pass(run_dir, monkeypatch):
    monkeypatch.setattr(recipes, "forward", lambda *args: pytest.fail("the training forward ran"))
    assert generate(config(run_dir, prompt="x"))


def test_a_run_means_its_best_checkpoint_and_a_file_means_itself(run_dir):
    directory = checkpoint.directory_of(run_dir)
    best = checkpoint.best_step(directory)
    assert best == 40
    assert checkpoint.steps_in(directory) == [10, 20, 30, 40]

    def first_weight(path):
        return load_model(path, MLPConfig(), CPU)[0].tokens.weight[0, 0].item()

    first, last = (first_weight(checkpoint.path_of(directory, step)) for step in (10, 40))
    assert first_weight(run_dir) == first_weight(directory) == last != first
    try:
        (directory / "best.json").write_text('{"step": 10}')
        assert first_weight(run_dir) == first
    finally:
        (directory / "best.json").write_text('{"step": 40}')


def test_precision(run_dir):
    for precision in ("bf16", "fp16", "fp32"):
        text = generate(config(run_dir, f"precision={precision}", prompt="import ", temperature=0.0))
        assert text.startswith("import ")
        assert len(text) > len("import ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("temperature=-1", "temperature=-1.0 must be >= 0"),
        ("temperature=nan", "temperature=nan is not a finite number"),
        ("temperature=inf", "temperature=inf is not a finite number"),
        ("top_k=-1", "top_k=-1 must be >= 0"),
        ("top_p=0", "top_p=0.0 must be > 0"),
        ("top_p=1.01", "top_p=1.01 must be <= 1"),
        ("max_new_tokens=-5", "max_new_tokens=-5 must be >= 0"),
        ("seed=-1", "seed=-1 must be >= 0"),
        ("precision=fp8", "precision='fp8' is not one of auto, fp32, bf16, fp16"),
        ("device=tpu", "device='tpu' is not one of auto, cpu, cuda, cuda:N"),
        ("mlp.engine=nvmth", "mlp.engine='nvmth' is not one of auto, nvmath, reference; did you mean nvmath"),
        ("checkpoint=/no/where", "checkpoint='/no/where': no such file or directory"),
    ],
)
def test_bad_values_are_refused(tmp_path, override, message):
    with pytest.raises(ConfigError) as refusal:
        compose_config([f"checkpoint={tmp_path}", override], "generate", GenerateConfig)
    assert message in str(refusal.value)


def test_a_gpu_that_is_not_there_is_refused(run_dir):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="device=cuda: "):
        generate(config(run_dir, device="cuda"))


def test_a_damaged_checkpoint_is_refused_by_name(run_dir, tmp_path):
    whole = checkpoint.path_of(checkpoint.directory_of(run_dir), 40)
    broken = tmp_path / "broken.pt"
    broken.write_bytes(whole.read_bytes()[:-50])
    with pytest.raises(ConfigError, match=r"broken\.pt: it is not a whole checkpoint"):
        generate(config(broken))


def command(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, "-m", "fusedmlp.generate", *arguments],
        capture_output=True,
        encoding="utf-8",
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


def test_the_command_prints_the_text(run_dir, tmp_path):
    done = command(tmp_path, f"checkpoint={run_dir}", "prompt='été 😀 def f(x):'", "max_new_tokens=8", "temperature=0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("été 😀 def f(x):")
    assert done.stdout.rstrip("\n") == generate(
        config(run_dir, prompt="été 😀 def f(x):", max_new_tokens=8, temperature=0.0)
    ).rstrip("\n")


def test_the_command_without_a_run_leaves_with_status_2(tmp_path):
    done = command(tmp_path, f"checkpoint={tmp_path}", "prompt=x")
    assert done.returncode == 2
    assert f"{tmp_path}: no checkpoint there" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
