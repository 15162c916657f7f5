"""Can an Energy Transformer complete pictures as well as a transformer?

    et                the Energy Transformer with all that the library's energy has:
                      relative positions in the scores that start as distances,
                      normalized heads, a β of every head, memories with thresholds and
                      signs, learned step sizes and a gate
    et-metric         the same with a step size for every channel, along the turning
                      force, in place of the gate for every token
    et-maps           that with a map of its own for every step's sizes
    transformer       a weight-shared transformer with a free table of relative positions
    transformer-gated the same with a factor for every channel of what its block adds,
                      from the same map as et-metric's
    transformer-maps  that with a map for every step, as et-maps has
    transformer-plain the transformer without the table
    et-paper          the Energy Transformer as in the paper: its start, α = 0.1, T = 12
    hyperset          Hyper-SET as published (Hu, Zou, Xu, arXiv 2502.11646) for masked
                      images: its two steps, sizes from a network
    hyperset-true     the gradient of the energy that Hyper-SET reports, descended with
                      learned step sizes and a gate

All have the same width and heads. Memories or hidden units make up for the rest: once
for as many operations as the transformer's (`-operations`), once for as many parameters
(`-parameters`). Where even no memories would be too many, the model is narrower.

    python experiments/image_pair.py --only transformer --lr 0.016

The rate of a model was chosen by short runs of 450 steps with seed 0: on a grid in steps
of √2, three rates below and above a first guess, then beyond the best until it was not
at an edge of those tried. All runs are scored on 1,000 validation pictures with fixed
occlusions, by which rates and weights are chosen. One that is longer than `--trial-steps`
is also scored on the test split, once, when it ends, and nothing is chosen by that; and
of a model with an energy, the steps on 100 pictures that raised it are counted.

Each run is one file in results/image-pair, written when it ends, a full run with the
error on every test picture beside it. A run whose file stands is not made again.
With another `--weight-decay` runs are a comparison of their own, and their names say so.
Checkpoints are in runs/image-pair: a command that was stopped goes on from them when it
is given again, and the numbers are those of an uninterrupted run. scripts/records.py
makes tables of the runs.
"""

from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from runs import RUNS, add_fields, keep, options, parameters_of, score

from et_nbdev.attention import RelativePositions
from et_nbdev.block import Block
from et_nbdev.dynamics import Trajectory
from et_nbdev.energy import Energy
from et_nbdev.memory import HopfieldMemory, SignedMemory
from et_nbdev.norm import EnergyLayerNorm
from et_nbdev.solvers import LearnedEuler, LearnedMetric
from et_nbdev.training import OptimConfig, atomic_write, fit, option
from et_nbdev.vision import data
from et_nbdev.vision import model as library
from et_nbdev.vision.train import TrainConfig, evaluate, training_loss

WEIGHT_DECAY = OptimConfig.weight_decay

# --- sizes ---

_small = dict(dim=128, num_heads=4, head_dim=32, num_memories=512, steps=6)
SIZES = {"small": library.ImageConfig(**_small, step_size=1.0)}
# image and patch size: 64 tokens each
DATA = {"tiny-imagenet": (64, 8), "cifar10": (32, 4), "digits": (8, 1)}
VALIDATED = 1000  # pictures that choose weights and rates


@dataclass(frozen=True)
class Plan:
    "What all runs of a comparison share."

    size: str = option("small", "width, heads and steps of all models")
    data: str = option("tiny-imagenet", "a set of pictures")
    batch_size: int = option(64, "pictures in a step of training")
    trial_steps: int = option(450, "longest run that does not see the test split")
    steps: int = option(10_938, "length of a full run; of ten passes")
    weight_decay: float = option(WEIGHT_DECAY, "AdamW's, on matrices")
    lr: float = option(0.016, "peak rate")
    seeds: tuple[int, ...] = option((0, 1, 2), "seeds")

    @property
    def kind(self) -> str:
        "How the results of this plan are told from those of others."
        kind = f"{self.data}-{self.size}-{self.batch_size}"
        if self.weight_decay != WEIGHT_DECAY:
            kind += f"-decay-{self.weight_decay:g}"
        return kind

    @property
    def base(self) -> library.ImageConfig:
        "The transformer's width and depth, which the others are compared with."
        image_size, patch_size = DATA[self.data]
        own = dict(image_size=image_size, patch_size=patch_size)
        return replace(SIZES[self.size], **own)


# --- models ---


def rms(w, eps=1e-6):
    "The entries of w divided by their root mean square."
    return w / jnp.sqrt(jnp.mean(w**2, -1, keepdims=True) + eps)


def _normal(rngs, shape, fan_in):
    draw = jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(draw * fan_in**-0.5)


class RepellingAttention(Energy):
    "Hyper-SET's attention energy: tokens of fixed length inside a head, that repel."

    def __init__(self, dim: int, num_heads: int, head_dim: int, *, rngs: nnx.Rngs):
        self.W = _normal(rngs, (num_heads, dim, head_dim), dim)

    def token_energy(self, g):
        w = rms(jnp.einsum("...nd,hdy->...hny", g, self.W[...]))
        root = w.shape[-1] ** 0.5
        scores = jnp.einsum("...hay,...hby->...hab", w, w) / root
        return root * jnp.sum(jax.nn.logsumexp(scores, -1), -2)


class SphericalMemory(Energy):
    "Hyper-SET's feed-forward energy: overlaps of fixed length, rectified and squared."

    def __init__(self, dim: int, hidden: int, *, rngs: nnx.Rngs):
        self.W = _normal(rngs, (hidden, dim), dim)

    def token_energy(self, g):
        overlap = jnp.einsum("...nd,kd->...nk", g, self.W[...])
        return -jnp.sum(jax.nn.relu(rms(overlap)) ** 2, -1) / 2


class HyperSet(nnx.Module):
    """Hyper-SET's block for masked images, as published: attention, then feed-forward,
    each without the Jacobian of its norm, in steps of any sign for each token, channel
    and t, from a network that sees t and the tokens at the start.
    """

    def __init__(self, c: library.ImageConfig, *, rngs: nnx.Rngs):
        H, D, Y, K = c.num_heads, c.dim, c.head_dim, c.num_memories
        gain = lambda size: nnx.Param(jnp.ones(size, jnp.float32))
        self.attention = RepellingAttention(D, H, Y, rngs=rngs)
        self.memory = SphericalMemory(D, K, rngs=rngs)
        self.head_gain, self.hidden_gain, self.step_gain = gain(Y), gain(K), gain(D)
        zeros = nnx.initializers.zeros_init()
        self.sizes = nnx.Linear(D, 2 * D, kernel_init=zeros, rngs=rngs)

    def attend(self, x):
        W = self.attention.W[...]
        w = rms(jnp.einsum("...nd,hdy->...hny", x, W))
        w = w * jnp.broadcast_to(self.head_gain[...], w.shape)
        s = jnp.einsum("...hay,...hby->...hab", w, w) / w.shape[-1] ** 0.5
        P = jax.nn.softmax(s, -1) + jax.nn.softmax(s, -2)
        return jnp.einsum(
            "...hab,...hby,hdy->...ad", P, w, W, optimize=[(0, 1), (0, 1)]
        )

    def recall(self, x):
        W = self.memory.W[...]
        h = rms(jnp.einsum("...nd,kd->...nk", x, W))
        h = jax.nn.relu(h * jnp.broadcast_to(self.hidden_gain[...], h.shape))
        return jnp.einsum("...nk,kd->...nd", h, W)

    def step_sizes(self, start, t: int):
        "Step sizes of attention and feed-forward for all tokens and channels."
        D = start.shape[-1]
        wave = (t + 1) * np.geomspace(1, 1e-4, D // 2)
        time = np.concatenate([np.sin(wave), np.cos(wave), np.zeros(D % 2)])
        seen = rms(start + jnp.broadcast_to(time.astype(start.dtype), start.shape))
        seen = seen * jnp.broadcast_to(self.step_gain[...], seen.shape)
        with jax.numpy_rank_promotion("allow"):
            return jnp.split(self.sizes(nnx.gelu(seen)), 2, -1)

    def __call__(self, x, start, t: int):
        a, b = self.step_sizes(start, t)
        x = x - a * self.attend(x)
        return x + b * self.recall(x)


class EnergyModel(library.ImageEnergyTransformer):
    "The library's, with all steps stored in training."

    def descend(self, patches, masked, **options):
        # a CPU is faster with all steps in one program, a compiler with one of them
        options |= dict(remat=False, unroll=jax.default_backend() == "cpu" or 1)
        return super().descend(patches, masked, **options)


class ConventionalModel(library.ImageTransformer):
    "The library's, likewise."

    def advance(self, x, start, t: int):
        "The tokens after step t, of which the first had those at the start."
        return self.block(x)

    def descend(self, patches, masked, *, steps=None, **_):
        x = start = self.encode(patches, masked)
        for t in range(self.config.steps if steps is None else steps):
            x = self.advance(x, start, t)
        return x, Trajectory(None, None)


class GatedConventionalModel(ConventionalModel):
    "The same with the sizes of a `LearnedMetric` for what its block adds, from 1 on."

    map_per_step = False

    def __init__(self, c: library.ImageConfig, *, rngs: nnx.Rngs):
        super().__init__(c, rngs=rngs)
        self.metric = LearnedMetric(c.steps, c.dim, 2.0, self.map_per_step)

    def advance(self, x, start, t: int):
        return x + self.metric.sizes(self.block.norm1(x), t) * (self.block(x) - x)


class MappedConventionalModel(GatedConventionalModel):
    "That with a map for the sizes of every step."

    map_per_step = True


class HyperSetModel(ConventionalModel):
    "That block, which sees the tokens at the start, too."

    def advance(self, x, start, t: int):
        return self.block(x, start, t)


# --- recipes: what the library's do not have ---


class GatedEuler(LearnedEuler):
    "Learned steps with a fraction for every token, α_t sigmoid(w·g_A + b); ½ at first."

    def __init__(self, steps: int, step_size: float, dim: int):
        super().__init__(steps, step_size)
        self.w, self.b = (nnx.Param(jnp.zeros(shape)) for shape in (dim, ()))

    def sizes(self, g, t):
        gate = jax.nn.sigmoid(g @ self.w[...] + self.b[...])
        return super().sizes(g, t) * gate[..., None]


def gate(c: library.ImageConfig) -> GatedEuler:
    return GatedEuler(c.steps, c.step_size, c.dim)


def metric(c: library.ImageConfig) -> LearnedMetric:
    return LearnedMetric(c.steps, c.dim, c.step_size)


def true_hyperset(c: library.ImageConfig, rngs) -> library.Parts:
    start = library.wave_start(c, rngs)
    attention = RepellingAttention(c.dim, c.num_heads, c.head_dim, rngs=rngs)
    memory = SphericalMemory(c.dim, c.num_memories, rngs=rngs)
    block = Block(EnergyLayerNorm(c.dim), attention=attention, memory=memory)
    return library.Parts(*start, block, gate(c))


OWN = {
    "et": lambda c, rngs: library.tiny_imagenet(c, rngs, gate(c)),
    "et-metric": lambda c, rngs: library.tiny_imagenet(c, rngs, metric(c)),
    "transformer-bare": partial(library.transformer, table=False),
    "hyperset": lambda c, rngs: library.Parts(
        *library.wave_start(c, rngs), HyperSet(c, rngs=rngs)
    ),
    "hyperset-true": true_hyperset,
}
library.RECIPES |= OWN
# and what files of 0.2 say of them
_metric = dict(library.OLDER["tiny-imagenet"])
del _metric["map_per_step"]
_gate = {name: _metric[name] for name in _metric if name != "channel_steps"}
library.OLDER |= {"et": _gate | dict(gate_steps=True), "et-metric": _metric}

STEPS = {
    "channels": metric,
    "tokens": gate,
    "steps": lambda c: LearnedEuler(c.steps, c.step_size),
    "fixed": lambda c: None,
}


def parts(
    c: library.ImageConfig,
    rngs: nnx.Rngs,
    positions: str | None = "distance",  # in the scores; "zero", or None
    normalize: bool = True,
    betas: str = "heads",  # "one" for all heads; "fixed"
    negative: float | None = 0.25,  # None: no signs, no thresholds
    sizes: str = "channels",  # of `STEPS`
    start=library.wave_start,  # MASK and positions of the tokens
    heads=library.tied_heads,
    terms=("attention", "memory"),
    **attention,
) -> library.Parts:
    "The recipe of `et-metric`, by default; the rest are options of attention."
    begin = start(c, rngs)
    beta = (4 if normalize else 1) * c.head_dim**-0.5
    if betas != "fixed":
        beta = nnx.Param(np.full(c.num_heads, beta) if betas == "heads" else beta)
    bias = positions and RelativePositions(c.side, c.num_heads, positions)
    attention = dict(beta=beta, normalize=normalize, positions=bias) | attention

    def memory():  # the one with signs is drawn after the other
        plain = HopfieldMemory(c.dim, c.num_memories, rngs=rngs)
        signed = c.dim, c.num_memories, negative
        return plain if negative is None else SignedMemory(*signed, rngs=rngs)

    sized = partial(heads, c.dim, c.num_heads, c.head_dim, **attention)
    make = {"attention": lambda: sized(rngs=rngs), "memory": memory}
    block = Block(EnergyLayerNorm(c.dim), **{name: make[name]() for name in terms})
    return library.Parts(*begin, block, STEPS[sizes](c))


# of `parts` that make it the energy of the paper, "waves" in the library
PLAIN = dict(
    positions=None, normalize=False, betas="fixed", negative=None, sizes="fixed"
)

# --- designs ---


class Design(NamedTuple):
    recipe: str
    sizes: str = ""  # what the sizes of a step come from: a gate, a map, a network
    kind: type = EnergyModel
    numbers: dict = {}

    def config(self, base: library.ImageConfig) -> library.ImageConfig:
        "Learned steps of an energy let half of α pass at the start, so it is twice."
        halves = self.kind is EnergyModel and self.sizes
        numbers = {"step_size": base.step_size * (2 if halves else 1)} | self.numbers
        return replace(base, recipe=self.recipe, **numbers)


DESIGNS = {
    "et": Design("et", "gate"),
    "et-metric": Design("et-metric", "map"),
    "et-maps": Design("tiny-imagenet", "map"),
    "transformer": Design("transformer", kind=ConventionalModel),
    "transformer-gated": Design("transformer", "map", GatedConventionalModel),
    "transformer-maps": Design("transformer", "map", MappedConventionalModel),
    "transformer-plain": Design("transformer-bare", kind=ConventionalModel),
    "et-paper": Design("paper", numbers=dict(steps=12, step_size=0.1)),
    "hyperset": Design("hyperset", "network", HyperSetModel),
    "hyperset-true": Design("hyperset-true", "gate"),
}
COMPARISONS = ("-operations", "-parameters")
# both comparisons are with the transformer, and factors cost operations alone
ONLY = dict.fromkeys(("transformer", "transformer-plain"), ("",))
ONLY |= dict.fromkeys(("transformer-gated", "transformer-maps"), COMPARISONS[:1])
NAMES = tuple(n + by for n in DESIGNS for by in ONLY.get(n, COMPARISONS))


def design_of(name: str) -> str:
    "The key of `DESIGNS` that a model's name begins with."
    return name.removesuffix("-operations").removesuffix("-parameters")


def make(
    config: library.ImageConfig, name: str, seed: int = 0
) -> library.ImageEnergyTransformer:
    "A fresh model by its name."
    return DESIGNS[design_of(name)].kind(config, rngs=nnx.Rngs(seed))


def operations(config: library.ImageConfig, name: str) -> int:
    "Floating-point operations of all matrix products in a forward pass of a picture."
    design = design_of(name)
    N, D, K = config.num_tokens, config.dim, config.num_memories
    HY = config.num_heads * config.head_dim
    # products over pairs of tokens: an energy has two pulls, the others one, or a sum
    pairs = 4 if design.startswith("transformer") or design == "hyperset" else 6
    sizes = {"": 0, "gate": D, "map": D * D, "network": 2 * D * D}
    sizes = sizes[DESIGNS[design].sizes]
    # projections into the heads and back, memories and back; Hyper-SET has one matrix
    products = 4 if design.startswith("hyperset") else 8
    step = products * N * D * HY + pairs * N * N * HY + 4 * N * D * K + 2 * N * sizes
    return config.steps * step + 4 * N * config.patch_dim * D


@lru_cache(None)
def parameters(config: library.ImageConfig, name: str) -> int:
    return parameters_of(nnx.eval_shape(lambda: make(config, name)))


def filled(
    config: library.ImageConfig, name: str, measure, goal: int
) -> library.ImageConfig:
    "With the number of memories, at least 1, whose `measure` is closest to the goal."
    at = lambda K: measure(replace(config, num_memories=K), name)
    count = 1 + round((goal - at(1)) / (at(2) - at(1)))
    return replace(config, num_memories=max(1, count))


@lru_cache(None)
def sized(base: library.ImageConfig, name: str) -> library.ImageConfig:
    """A model's configuration, with as many memories (or hidden units) as make its
    operations or parameters those of the transformer. If that is fewer than D, both
    numbers are chosen, near K = 4D.
    """
    change = DESIGNS[design_of(name)].config
    if not name.endswith(COMPARISONS):
        return change(base)
    measure = operations if name.endswith("operations") else parameters
    goal = measure(sized(base, "transformer"), "transformer")

    at = lambda c: filled(change(c), name, measure, goal)
    if (config := at(base)).num_memories >= config.dim:
        return config
    # the first is a single entry a head, the last as wide as the others
    widths = range(1, base.head_dim + 1)
    found = (at(replace(base, dim=Y * base.num_heads, head_dim=Y)) for Y in widths)
    return min(found, key=lambda c: abs(c.num_memories - 4 * c.dim))


# --- pictures ---


def pictures(plan: Plan, folder: Path) -> dict[str, np.ndarray]:
    """Training, validation and test pictures as uint8 (n, S, S, C) in memory, decoded
    once and kept in `folder`.
    """
    found = {}
    for split in ("train", "validation", "test"):
        path = folder / f"{plan.data}-{split}.npy"
        if not path.exists():
            images = data.load_images(plan.data, split, size=plan.base.image_size)[:]
            with atomic_write(path) as temporary, open(temporary, "wb") as file:
                np.save(file, images)
        found[split] = np.load(path, mmap_mode="r")
    return found | {"validation": found["validation"][:VALIDATED]}


# --- runs ---


@dataclass(frozen=True)
class Job:
    "One training."

    name: str  # of `NAMES`
    steps: int
    lr: float
    seed: int

    def file(self, plan: Plan) -> str:
        "The name of its files."
        return f"{plan.kind}-{self.name}-{self.steps}-{self.lr:g}-{self.seed}"


def configured(plan: Plan, job: Job, images: dict) -> TrainConfig:
    "All that fixes a training, the channels and statistics of the pictures included."
    known = data.Images.statistics(images["train"])
    mean, std = (tuple(v.tolist()) for v in known)
    channels = images["train"].shape[-1]
    base = replace(plan.base, channels=channels, mean=mean, std=std)
    rates = dict(lr=job.lr, lr_floor=1e-4 * job.lr, weight_decay=plan.weight_decay)
    return TrainConfig(
        sized(base, job.name),
        OptimConfig(steps=job.steps, warmup=min(job.steps // 9, 500), **rates),
        data=plan.data,
        batch_size=plan.batch_size,
        validate_on=VALIDATED,
        every=-(-job.steps // (20 if job.steps > plan.trial_steps else 3)),
        seed=job.seed,
    )


def score_of(model, config: TrainConfig, images) -> np.ndarray:
    "Each picture's error on its occluded patches, with occlusions that are fixed."
    return evaluate(model, images, config.num_occluded)


@nnx.jit
def energies_along(model: EnergyModel, patches, masked):
    return model.descend(patches, masked)[1].energies.total


def rises(model: EnergyModel, images: np.ndarray) -> dict:
    """Of all steps on these pictures, how many raised the energy, which of the T steps
    these were, the largest rise, and learned sizes α_t.
    """
    c, N = model.config, model.config.num_tokens
    patches = data.patchify(
        data.normalize(jnp.asarray(images), c.mean, c.std), c.patch_size
    )
    masked = data.occlude(jax.random.key(0), len(images), N, N // 2, 0.0)[1]
    energies = np.asarray(energies_along(model, patches, masked))
    up = np.diff(energies, axis=0) / np.abs(energies[:-1])
    raised = (up > 1e-6).sum(1)  # in how many pictures each of the T steps did so
    found = {
        "steps_observed": up.size,
        "steps_up": int(raised.sum()),
        "raised_by_step": raised.tolist(),
        "largest_relative_rise": float(max(up.max(), 0)),
    }
    if hasattr(model, "solver"):
        found["alpha"] = np.exp(model.solver.log_alpha[...]).tolist()
    return found


def curve(history: list[dict], batch_size: int) -> list[dict]:
    "The log as rows against pictures seen, with the seconds it took."
    names = dict(loss="training", validation_loss="validation")
    return [
        {"pictures": row["step"] * batch_size, "seconds": row["seconds"]}
        | {names[key]: row[key] for key in names if key in row}
        for row in history
    ]


def trained(model, config: TrainConfig, images: dict, loss=None, /, **options):
    """What `fit` makes of the model on these pictures; the weights are those that are
    best on validation, unless `validate` says otherwise.
    """
    train, batch_size, seed = images["train"], config.batch_size, config.seed
    mse = lambda model: score_of(model, config, images["validation"]).mean()
    options = dict(validate=lambda m: {"loss": mse(m)}, every=config.every) | options
    return fit(
        model,
        loss or training_loss(config),
        lambda start: data.batches(train, batch_size, seed=seed, start=start),
        config.optim,
        seed=seed,
        progress=False,
        **options,
    )


def run(plan: Plan, job: Job, images: dict, folder: Path, **options) -> dict:
    "Train, or go on training, in `folder`; what the run's file holds."
    config = configured(plan, job, images)
    row = asdict(job) | {"kind": plan.kind, "validation_mse": None} | origin(config)
    row["parameters"] = parameters(config.model, job.name)
    row["operations"] = operations(config.model, job.name)
    row["training_pictures"] = len(images["train"])
    options |= dict(folder=folder, config=asdict(config) | {"name": job.name})
    fresh = make(config.model, job.name, job.seed)
    try:
        fitted = trained(fresh, config, images, **options)
    except FloatingPointError as error:  # the loss was no longer finite
        return row | {"diverged": str(error)}
    model, rows = fitted.model, curve(fitted.history, config.batch_size)
    best = fitted.best_step * config.batch_size
    if job.steps > plan.trial_steps:
        row["test_errors"] = score_of(model, config, images["test"])
        row["test_mse"] = float(row["test_errors"].mean())
        if isinstance(model, EnergyModel):
            row |= rises(model, images["validation"][:100])
    row["validation_mse"] = next(r["validation"] for r in rows if r["pictures"] == best)
    row |= {"best_step": fitted.best_step, "seconds": rows[-1]["seconds"]}
    return row | {"curve": rows}


def origin(config: TrainConfig) -> dict:
    found = {"config": asdict(config), "backend": jax.default_backend()}
    # a GPU may round the factors of products of float32
    found["precision"] = jax.config.jax_default_matmul_precision or "default"
    return found


def write(out: Path, name: str, row: dict):
    "One file for a run, and one for its error on every test picture."
    out.mkdir(parents=True, exist_ok=True)
    if (errors := row.pop("test_errors", None)) is not None:
        np.save(out / f"{name}.npy", errors.astype(np.float16))
    keep(out / f"{name}.json", row)
    print(f"{name:<52} {score(row):.4f}  {row.get('seconds', 0):.0f} s", flush=True)


def work(plan: Plan, names, out: Path, runs: Path, images: dict):
    "Make the runs that `out` lacks, seed by seed."
    for seed, name in product(plan.seeds, names):
        job = Job(name, plan.steps, plan.lr, seed)
        file = job.file(plan)
        if not (out / f"{file}.json").exists():
            write(out, file, run(plan, job, images, runs / file))


def main(argv: list[str] | None = None):
    parser = options(__doc__, "image-pair")
    add = parser.add_argument
    these = dict(nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    add("--only", help="these models, not all", **these)
    add("--runs", type=Path, default=RUNS / "image-pair", help="checkpoints")
    add_fields(parser, Plan)
    args = vars(parser.parse_args(argv))
    plan = Plan(**{name: args[name] for name in Plan.__dataclass_fields__})
    names = [name for name in NAMES if name in args["only"]]
    images = pictures(plan, args["runs"].parent)
    work(plan, names, args["out"], args["runs"], images)


if __name__ == "__main__":
    main()
