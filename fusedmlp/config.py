"""The configuration: every key, its type, its default, and what values it may take.

YAML under ``conf/`` holds values; this file holds types. This room knows nothing of torch, so that a wrong key is
refused within a second.
"""

from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.config_store import ConfigStore

from fusedmlp.schema import Checks


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Shape of the GPT."""

    n_layer: int = 4
    """Number of transformer blocks."""
    n_head: int = 4
    """Attention heads; must divide ``d_model``."""
    d_model: int = 128
    """Width of the residual stream."""
    d_hidden: int | None = None
    """Width of the MLP's hidden layer; null means 4 x d_model."""
    block_size: int = 128
    """Context length in tokens."""
    activation: str = "gelu"
    """``gelu`` (the tanh approximation, the one cuBLASLt computes) or ``relu``."""
    bias: bool = True
    """Biases in linear layers and LayerNorms."""
    dropout: float = 0.0
    """Dropout probability on embeddings, attention weights and residual branches."""

    def __post_init__(self) -> None:
        """Validate."""
        c = Checks(self, "model.")
        c.number("n_layer", "n_head", "d_model", "d_hidden", "block_size", ge=1)
        c.number("dropout", ge=0, lt=1)
        c.choice("activation", "gelu", "relu")
        if self.n_head >= 1:
            c.that(
                self.d_model % self.n_head == 0,
                f"model.d_model={self.d_model} must be a multiple of model.n_head={self.n_head}",
            )
        c.done()

    @property
    def hidden(self) -> int:
        """Width of the MLP's hidden layer."""
        return self.d_hidden if self.d_hidden is not None else 4 * self.d_model


COMPUTE_TYPES = (
    "COMPUTE_32F",
    "COMPUTE_32F_FAST_TF32",
    "COMPUTE_32F_FAST_16BF",
    "COMPUTE_32F_FAST_16F",
    "COMPUTE_16F",
    "COMPUTE_32F_PEDANTIC",
)


@dataclass(kw_only=True, slots=True)
class MLPConfig:
    """Who computes the MLP blocks."""

    backend: str = "fused"
    """The arm: ``torch`` (nn.Linear, activation, nn.Linear) or ``fused`` (GEMMs with epilogs)."""
    engine: str = "auto"
    """Who executes the fused recipe: ``nvmath`` (CUDA), ``reference`` (torch operations), ``auto`` picks by device."""
    on_unsupported: str = "fallback"
    """What the engine cannot do: ``fallback`` computes it with torch operations and says so once; ``error`` raises."""
    search: str = "measured"
    """``measured`` autotunes each GEMM and races the recipes; ``heuristic`` takes cuBLASLt's first and a rule."""
    compute_type: str | None = None
    """cuBLASLt compute type; null takes the usual one for the dtype (COMPUTE_32F)."""
    plan_store: str | None = "auto"
    """File that keeps autotuned algorithms and races between runs: a path, ``auto`` for one in the cache directory, or
    null to keep them in the process only."""

    def __post_init__(self) -> None:
        """Validate."""
        c = Checks(self, "mlp.")
        c.choice("backend", "torch", "fused")
        c.choice("engine", "auto", "nvmath", "reference")
        c.choice("on_unsupported", "fallback", "error")
        c.choice("search", "measured", "heuristic")
        c.choice("compute_type", None, *COMPUTE_TYPES)
        c.that(self.plan_store != "", "mlp.plan_store is empty; give a path, auto or null")
        c.done()


@dataclass(kw_only=True, slots=True)
class HubConfig:
    """A data set on the Hugging Face hub."""

    path: str | None = None
    """Data set id, for example ``roneneldan/TinyStories``."""
    name: str | None = None
    """Configuration of the data set, where it has several."""
    split: str = "train"
    """Split to read; train and validation parts are cut from it by ``data.val_fraction``."""
    revision: str | None = None
    """Commit, tag or branch."""
    streaming: bool = False
    """Read without downloading the whole data set first."""
    max_documents: int | None = None
    """Stop after this many documents; null reads all."""

    def __post_init__(self) -> None:
        """Validate."""
        c = Checks(self, "data.hub.")
        c.number("max_documents", ge=1)
        c.that(self.path != "", "data.hub.path is empty; give a data set id")
        c.done()


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Where the tokens come from."""

    source: str = "stdlib"
    """``stdlib`` (Python's own library sources), ``files``, ``hub`` or ``synthetic``."""
    files: list[str] = field(default_factory=list)
    """Paths or globs of .txt (any text), .jsonl or .parquet files; relative to where the command was started."""
    hub: HubConfig = field(default_factory=HubConfig)
    """The data set for ``source=hub``."""
    text_column: str = "text"
    """Column that holds the text in jsonl, parquet and hub data."""
    tokenizer: str = "bytes"
    """``bytes`` (257 tokens: every byte, and end of document) or ``bpe`` (trained on the training split)."""
    vocab_size: int = 4096
    """Size of the BPE vocabulary, end of document included; ``bytes`` has its own."""
    val_fraction: float = 0.1
    """Share of the text kept for validation."""
    synthetic_tokens: int = 1_000_000
    """Tokens drawn for ``source=synthetic``."""
    cache_dir: str | None = None
    """Where token files are kept; null means $FUSEDMLP_CACHE or ~/.cache/fusedmlp."""

    def __post_init__(self) -> None:
        """Validate."""
        c = Checks(self, "data.")
        c.choice("source", "stdlib", "files", "hub", "synthetic")
        c.choice("tokenizer", "bytes", "bpe")
        # 256 bytes and end of document are always there, so a BPE vocabulary starts above 257.
        c.number("vocab_size", ge=258, le=2**31 - 1)
        c.number("val_fraction", gt=0, lt=1)
        c.number("synthetic_tokens", ge=1)
        c.that(self.cache_dir != "", "data.cache_dir is empty; give a path or null")
        c.that(self.text_column != "", "data.text_column is empty")
        if self.source == "files":
            c.that(bool(self.files), "data.files is empty; data.source=files needs at least one path or glob")
        if self.source == "hub":
            c.that(self.hub.path is not None, "data.hub.path is null; data.source=hub needs a data set id")
        if self.source == "synthetic":
            c.that(self.tokenizer == "bytes", "data.tokenizer=bpe has no text to learn from with data.source=synthetic")
        c.done()


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """AdamW, and the learning rate over time: linear warm-up, then cosine down to ``min_lr``."""

    lr: float = 3e-3
    """Peak learning rate."""
    min_lr: float = 3e-4
    """Learning rate at the last step."""
    warmup_steps: int = 50
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices and embeddings only."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""

    def __post_init__(self) -> None:
        """Validate."""
        c = Checks(self, "optim.")
        c.number("lr", gt=0)
        c.number("min_lr", "weight_decay", "grad_clip", ge=0)
        c.number("warmup_steps", ge=0)
        c.number("beta1", "beta2", ge=0, lt=1)
        c.that(not self.min_lr > self.lr, f"optim.min_lr={self.min_lr} is above optim.lr={self.lr}")
        c.done()


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """The training loop. Every ``*_every`` counts optimizer steps; 0 switches that activity off."""

    max_steps: int = 800
    """Optimizer steps."""
    batch_size: int = 16
    """Sequences per device and micro-step."""
    grad_accum: int = 1
    """Micro-steps per optimizer step."""
    precision: str = "auto"
    """``fp32``, ``bf16``, ``fp16`` (with a gradient scaler); ``auto`` is bf16 on CUDA and fp32 on CPU."""
    compile: str = "off"
    """torch.compile mode: ``off``, ``default``, ``reduce-overhead`` or ``max-autotune``."""
    log_every: int = 10
    """Steps between rows of training metrics; at least 1."""
    eval_every: int = 100
    """Steps between evaluations."""
    eval_steps: int = 20
    """Batches in one evaluation."""
    save_every: int = 100
    """Steps between checkpoints."""
    keep_last: int = 2
    """Checkpoints kept besides the best one; at least 1."""
    sample_every: int = 0
    """Steps between printed samples; the end of a run prints samples in any case."""
    parity_every: int = 50
    """Steps between comparisons with the torch MLP on the same weights and batch."""

    def __post_init__(self) -> None:
        """Validate."""
        c = Checks(self, "trainer.")
        c.number("max_steps", "batch_size", "grad_accum", "log_every", "eval_steps", "keep_last", ge=1)
        c.number("eval_every", "save_every", "sample_every", "parity_every", ge=0)
        c.choice("precision", "auto", "fp32", "bf16", "fp16")
        c.choice("compile", "off", "default", "reduce-overhead", "max-autotune")
        c.done()


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """How many processes train one model."""

    strategy: str = "auto"
    """``auto`` and ``single`` train in one process; ``ddp`` and ``fsdp`` are refused until they are built."""

    def __post_init__(self) -> None:
        """Validate."""
        c = Checks(self, "parallel.")
        c.choice("strategy", "auto", "single", "ddp", "fsdp")
        c.that(
            self.strategy not in ("ddp", "fsdp"),
            f"parallel.strategy={self.strategy} is not available yet; this version trains in one process (auto)",
        )
        c.done()


@dataclass(kw_only=True, slots=True)
class TrackingConfig:
    """Weights & Biases. metrics.jsonl and summary.json are written whatever is chosen here."""

    wandb: str = "offline"
    """``offline`` (below the run directory), ``online`` or ``disabled``."""
    project: str = "fusedmlp"
    """W&B project."""
    entity: str | None = None
    """W&B team or user; null takes the account's default."""
    group: str | None = None
    """W&B group."""
    name: str | None = None
    """W&B run name; null takes the run directory's name."""
    tags: list[str] = field(default_factory=list)
    """W&B tags."""

    def __post_init__(self) -> None:
        """Validate."""
        c = Checks(self, "tracking.")
        c.choice("wandb", "offline", "online", "disabled")
        c.that(self.project != "", "tracking.project is empty")
        c.done()


@dataclass(kw_only=True, slots=True)
class Config:
    """Everything ``train.py`` needs."""

    seed: int = 1337
    """Seeds the weights, the order of the data and dropout."""
    device: str = "auto"
    """``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:N``."""
    run_dir: str | None = None
    """Where the run leaves its files; null makes a new directory under runs/."""
    resume: str | None = None
    """null starts anew; ``auto`` continues run_dir from its newest valid checkpoint, if any; or a path."""
    dry_run: bool = False
    """Check config and data, print what would be trained, and stop."""
    model: ModelConfig = field(default_factory=ModelConfig)
    mlp: MLPConfig = field(default_factory=MLPConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        """Validate what belongs to no section, or to several."""
        c = Checks(self, "")
        c.number("seed", ge=0, lt=2**63)
        _check_device(c)
        c.that(self.run_dir != "", "run_dir is empty; give a path or null")
        if self.resume not in (None, "auto"):
            path = Path(str(self.resume)).expanduser()
            hint = "; write resume=null to start anew" if str(self.resume).lower() in ("none", "", "no") else ""
            c.that(bool(self.resume) and path.exists(), f"resume={self.resume!r}: no such file or directory{hint}")
        c.that(
            self.optim.warmup_steps <= self.trainer.max_steps,
            f"optim.warmup_steps={self.optim.warmup_steps} exceeds trainer.max_steps={self.trainer.max_steps}: "
            "set a smaller optim.warmup_steps",
        )
        c.done()


@dataclass(kw_only=True, slots=True)
class GenerateConfig:
    """Everything ``python -m fusedmlp.generate`` needs."""

    checkpoint: str = "???"
    """A run directory (its best checkpoint, else its newest) or a checkpoint file."""
    prompt: str = ""
    """Text to continue; empty starts a new document."""
    max_new_tokens: int = 200
    """Tokens to generate."""
    temperature: float = 0.8
    """0 is greedy; higher is more random."""
    top_k: int = 50
    """Sample among the k most likely tokens; 0 switches it off, more than the vocabulary means all."""
    top_p: float = 1.0
    """Sample among the fewest tokens whose probabilities sum to p; 1 switches it off."""
    seed: int = 1337
    """Seeds the sampling."""
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    precision: str = "auto"
    """``auto`` (bf16 on CUDA, fp32 on CPU), ``fp32``, ``bf16`` or ``fp16``."""
    mlp: MLPConfig = field(default_factory=MLPConfig)
    """Which arm generates; any checkpoint loads into either."""

    def __post_init__(self) -> None:
        """Validate."""
        c = Checks(self, "")
        c.number("max_new_tokens", "top_k", "temperature", ge=0, le=10**6)
        c.number("seed", ge=0, lt=2**63)
        c.number("top_p", gt=0, le=1)
        c.choice("precision", "auto", "fp32", "bf16", "fp16")
        _check_device(c)
        c.that(
            Path(self.checkpoint).expanduser().exists(), f"checkpoint={self.checkpoint!r}: no such file or directory"
        )
        c.done()


# How an MLP may be computed in ``bench=mlp``; what each of them is: fusedmlp/mlp_arms.py.
BENCH_ARMS = (
    "fused",
    "eager",
    "compile",
    "max-autotune",
    "addmm_activation",
    "gemm_floor",
    "transformer_engine",
    "flash_attn",
    "apex",
)


@dataclass(kw_only=True, slots=True)
class BenchConfig:
    """Everything ``python -m fusedmlp.bench`` needs."""

    bench: str = "all"
    """``gemm`` (epilogs), ``mlp``, ``precision`` (compute types), ``host`` (cost of a call) or ``all``."""
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    run_dir: str | None = None
    """Where NAME.json, NAME.md and NAME.png go; null makes a new directory under runs/."""
    name: str | None = None
    """Name of the files; null takes the bench's. With ``bench=all`` they are called NAME_gemm, NAME_mlp, ..."""
    widths: list[int] = field(default_factory=lambda: [768, 1024, 1280, 1600, 2048, 4096])
    """Widths of the model; hidden layers are four times as wide."""
    tokens: int = 16384
    """Rows of the input. ``bench=host`` has tiny shapes of its own."""
    activations: list[str] = field(default_factory=lambda: ["gelu", "relu"])
    """``gelu`` (tanh approximation), ``relu``."""
    dtypes: list[str] = field(default_factory=lambda: ["bf16"])
    """``bf16``, ``fp16``, ``fp32``. ``bench=precision`` takes all of them, ``bench=host`` the first."""
    passes: list[str] = field(default_factory=lambda: ["training", "inference"])
    """``training`` (forward and backward), ``inference`` (no gradients)."""
    arms: list[str] | None = None
    """Who takes part in ``bench=mlp``; null means everybody who can."""
    rounds: int = 40
    """Times that each arm is measured; the arms take turns."""
    block_ms: float = 10.0
    """An arm's turn lasts about this long, milliseconds."""
    seed: int = 1337
    """Seeds the operands and the bootstrap."""
    mlp: MLPConfig = field(default_factory=MLPConfig)
    """Options of the fused arm."""

    def __post_init__(self) -> None:
        """Validate."""
        c = Checks(self, "")
        c.choice("bench", "gemm", "mlp", "precision", "host", "all")
        _check_device(c)
        for key in ("run_dir", "name"):
            c.that(getattr(self, key) != "", f"{key} is empty; give a {'path' if key == 'run_dir' else 'name'} or null")
        c.that("/" not in (self.name or ""), f"name={self.name!r} is no file name; the directory is run_dir")
        c.numbers("widths", ge=1)
        c.choices("activations", "gelu", "relu")
        c.choices("dtypes", "bf16", "fp16", "fp32")
        c.choices("passes", "training", "inference")
        if self.arms is not None:
            c.choices("arms", *BENCH_ARMS)
        c.number("tokens", "rounds", ge=1)
        c.number("block_ms", gt=0)
        c.number("seed", ge=0, lt=2**63)
        c.that(self.mlp.backend == "fused", "mlp.backend=torch has no options to measure; it is the arm eager")
        c.done()


def _check_device(c: Checks) -> None:
    kind, _, index = str(c.section.device).partition(":")
    ok = (kind in ("auto", "cpu", "cuda") and not index and ":" not in c.section.device) or (
        kind == "cuda" and index.isdecimal()
    )
    c.that(ok, f"device={c.section.device!r} is not one of auto, cpu, cuda, cuda:N")


def register() -> None:
    """Put the schemas where Hydra's defaults lists find them."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=Config)
    store.store(name="generate_schema", node=GenerateConfig)
    store.store(name="bench_schema", node=BenchConfig)
