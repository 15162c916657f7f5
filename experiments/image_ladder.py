"""From the transformer to the Energy Transformer, one change at a time.

Rung 0 is the library's weight-shared `TransformerBlock`, the last rung the update of
its `EnergyTransformer`. Each rung keeps the changes of those below it:

    0 transformer            biases, GELU, vector norms, two-layer MLP, sequential
    1 parallel halves        attention and MLP read the same norm, and are added
    2 no biases              in the linear layers; the norm keeps its shift
    3 no self-attention      a token does not attend to itself
    4 scalar norm            one scale γ ≥ 0 for all entries: the energy norm
    5 tied MLP               ReLU, and W_2 = W_1ᵀ: the Hopfield memory
    6 tied values            W_V = W_K and W_O = W_Qᵀ: the query term of the update;
                             W_K starts as W_Q, and parts from it in training
    7 key term               its other half: the update is −∂E/∂g

Every rung is trained without and with relative positions: a table b[h, Δrow, Δcolumn]
added to the scores before the softmax, the same at every step. It starts from zero; at
the last rung also from −distance × (¼ … 2), one factor a head. In the energy
E = −(1/β) Σ log Σ exp(β K·Q + b) it is a constant, so the update keeps its form.

All rungs have the same width, heads, depth, positions, batches, occlusions and, where
shapes agree, the same first weights. Tying saves operations and the key term costs
some; the hidden units make up for it (512; with tied values 576; with the key term
480), so every rung takes the same number of operations per picture. Tiny ImageNet, 450
steps of 64 pictures; scored on 1,000 pictures carved out of the training split, with
fixed occlusions. The test split is not touched.

    python experiments/image_ladder.py --check     # both ends against the library
    python experiments/image_ladder.py             # all runs
    python experiments/image_ladder.py --summary   # the table so far

All runs have the same learning rate, which was tuned for none of them. Seed 0 of every
rung comes first, then the other seeds. Each run is one file in results/image-ladder,
written when it ends. A run whose file stands is not made again, so the command can be
stopped and given again at any time. `--part 0/2` and `--part 1/2` share the work
between two processes.
"""

import time
import zlib
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from runs import RUNS, add_part, make, options, read, spread

from et_nbdev.block import EnergyTransformer
from et_nbdev.dynamics import Trajectory
from et_nbdev.norm import EnergyLayerNorm
from et_nbdev.testing import assert_close, assert_gradient, float64, half_interval
from et_nbdev.training import OptimConfig, atomic_write, fit
from et_nbdev.vision.data import batches, channel_statistics, load_images
from et_nbdev.vision.model import (
    RECIPES,
    ImageConfig,
    ImageTransformer,
    Parts,
    TransformerBlock,
    image_model,
    wave_start,
)
from et_nbdev.vision.train import TrainConfig, evaluate, training_loss

BASE = TrainConfig(
    ImageConfig(
        image_size=64,
        patch_size=8,
        dim=128,
        num_heads=4,
        head_dim=32,
        num_memories=512,
        steps=6,
        step_size=1.0,
    ),
    OptimConfig(steps=450, warmup=50, lr=1.0, lr_floor=1e-4),  # times the run's rate
    data="tiny-imagenet",
    batch_size=64,
    validate_on=1000,
    every=150,
)
LEARNING_RATE = 8e-3
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Design:
    "What a block is made of; the defaults are the conventional transformer's."

    parallel: bool = False
    biases: bool = True
    self_attention: bool = True
    tied_start: bool = False
    scalar_norm: bool = False
    relu: bool = False
    tied_mlp: bool = False
    tied_values: bool = False
    key_term: bool = False
    relative: str = "none"  # positions in the scores, their start: "zero", "distance"


CHANGES = {  # of each rung to the one before it
    "transformer": {},
    "parallel halves": dict(parallel=True),
    "no biases": dict(biases=False),
    "no self-attention": dict(self_attention=False),
    "scalar norm": dict(scalar_norm=True),
    "tied MLP": dict(relu=True, tied_mlp=True),
    "tied values": dict(tied_values=True, tied_start=True),
    "key term": dict(key_term=True),
}
# each with the changes of those before it
_designs = accumulate(CHANGES.values(), lambda d, c: replace(d, **c), initial=Design())
RUNGS = dict(zip(CHANGES, list(_designs)[1:]))


def designs() -> dict[str, Design]:
    "Everything that is trained, by the name of its files."
    found = {}
    for number, (name, design) in enumerate(RUNGS.items()):
        starts = ("none", "zero", "distance") if design.key_term else ("none", "zero")
        for start in starts:
            slug = f"{number}-{name.lower().replace(' ', '-')}-{start}"
            found[slug] = replace(design, relative=start)
    return found


def products(c: ImageConfig, d: Design) -> int:
    "Operations of one block on one picture, without the MLP."
    N, D, HY = c.num_tokens, c.dim, c.num_heads * c.head_dim
    # products with a weight matrix: Q, K, V and O; Q, K and back through W_Q; with the
    # key term also back through W_K
    weights = 3 if d.tied_values and not d.key_term else 4
    # products over pairs of tokens: scores, weighted values, weighted queries
    pairs = 3 if d.key_term else 2
    return 2 * weights * N * D * HY + 2 * pairs * N * N * HY


def sized(c: ImageConfig, d: Design) -> ImageConfig:
    "The configuration with the hidden units that make operations equal to rung 0's."
    spared = products(c, Design()) - products(c, d)
    hidden = c.num_memories + round(spared / (4 * c.num_tokens * c.dim))
    return replace(c, num_memories=hidden)


def operations(c: ImageConfig, d: Design) -> int:
    "Floating-point operations of all matrix products in one forward pass."
    mlp = 4 * c.num_tokens * c.dim * c.num_memories
    affine = 4 * c.num_tokens * c.patch_dim * c.dim
    return c.steps * (products(c, d) + mlp) + affine


class Block(nnx.Module):
    "One application: tokens (..., N, D) in and out, N patches of a square picture."

    def __init__(self, c: ImageConfig, design: Design, *, rngs: nnx.Rngs):
        self.design, self.head_dim = design, c.head_dim
        self.side = c.image_size // c.patch_size
        D, H, Y, K = c.dim, c.num_heads, c.head_dim, c.num_memories
        # a key per name: a matrix starts alike in every design that has it
        key = rngs.params()

        def draw(name, shape, fan_in):
            own = jax.random.fold_in(key, zlib.crc32(name.encode()))
            return nnx.Param(jax.random.normal(own, shape, jnp.float32) * fan_in**-0.5)

        zeros = lambda *shape: nnx.Param(jnp.zeros(shape, jnp.float32))
        norm = EnergyLayerNorm if design.scalar_norm else nnx.LayerNorm
        self.norm = norm(D, rngs=rngs)
        if not design.parallel:
            self.norm2 = norm(D, rngs=rngs)
        self.Wq, self.Wk = draw("Wq", (H, D, Y), D), draw("Wk", (H, D, Y), D)
        if design.tied_start:
            self.Wk[...] = self.Wq[...]
        if not design.tied_values:
            self.Wv, self.Wo = draw("Wv", (H, D, Y), D), draw("Wo", (H, D, Y), H * Y)
        self.W1 = draw("W1", (K, D), D)
        if not design.tied_mlp:
            self.W2 = draw("W2", (K, D), K)
        if design.biases:
            self.bq, self.bk, self.bv = (zeros(H, 1, Y) for _ in range(3))
            self.bo, self.b1, self.b2 = zeros(D), zeros(K), zeros(D)
        if design.relative != "none":
            offset = np.arange(1 - self.side, self.side)
            distance = np.hypot(offset[:, None], offset).astype(np.float32)
            slopes = np.geomspace(0.25, 2, H) * (design.relative == "distance")
            self.table = nnx.Param(
                jnp.asarray(-slopes[:, None, None] * distance, jnp.float32)
            )

    def scores(self, Q, K):
        "What the softmax is taken of: β K·Q + b, minus infinity where none may look."
        scores = jnp.einsum("...hcy,...hby->...hcb", Q, K) * self.head_dim**-0.5
        if self.design.relative != "none":
            row, column = np.divmod(np.arange(self.side**2), self.side)
            offset = lambda at: at[:, None] - at[None, :] + self.side - 1
            scores = scores + self.table[...][:, offset(row), offset(column)]
        if not self.design.self_attention:
            scores = jnp.where(np.eye(scores.shape[-1], dtype=bool), -jnp.inf, scores)
        return scores

    def queries_and_keys(self, g):
        project = lambda W: jnp.einsum("...nd,hdy->...hny", g, W[...])
        return project(self.Wq), project(self.Wk)

    def attention(self, g):
        d = self.design
        Q, K = self.queries_and_keys(g)
        V = K if d.tied_values else jnp.einsum("...nd,hdy->...hny", g, self.Wv[...])
        if d.biases:
            Q, K, V = Q + self.bq[...], K + self.bk[...], V + self.bv[...]
        P = jax.nn.softmax(self.scores(Q, K))
        back = lambda pull, W: jnp.einsum("...hny,hdy->...nd", pull, W[...])
        seen = jnp.einsum("...hab,...hby->...hay", P, V)
        update = back(seen, self.Wq if d.tied_values else self.Wo)
        if d.key_term:
            update += back(jnp.einsum("...hca,...hcy->...hay", P, Q), self.Wk)
        return update + self.bo[...] if d.biases else update

    def mlp(self, g):
        d = self.design
        a = jnp.einsum("...nd,kd->...nk", g, self.W1[...])
        if d.biases:
            a = a + self.b1[...]
        h = jax.nn.relu(a) if d.relu else jax.nn.gelu(a)
        update = jnp.einsum(
            "...nk,kd->...nd", h, (self.W1 if d.tied_mlp else self.W2)[...]
        )
        return update + self.b2[...] if d.biases else update

    def energy(self, g):
        "Of the last rung: its update is −∂E/∂g."
        Q, K = self.queries_and_keys(g)
        lse = jax.nn.logsumexp(self.scores(Q, K), -1)
        r = jax.nn.relu(jnp.einsum("...nd,kd->...nk", g, self.W1[...]))
        return -(self.head_dim**0.5) * lse.sum((-2, -1)) - 0.5 * (r**2).sum((-2, -1))

    def __call__(self, x):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            if self.design.parallel:
                g = self.norm(x)
                return x + self.attention(g) + self.mlp(g)
            x = x + self.attention(self.norm(x))
            return x + self.mlp(self.norm2(x))


def recipe(design: Design, c: ImageConfig, rngs) -> Parts:
    "One key whatever the design: encoder, MASK and decoder start alike in all."
    return Parts(*wave_start(c, rngs), Block(c, design, rngs=nnx.Rngs(rngs.params())))


class Model(ImageTransformer):
    "The library's image model with `Block` inside."

    def __init__(self, config: ImageConfig, design: Design, *, rngs: nnx.Rngs):
        self.design = design
        RECIPES[str(design)] = partial(recipe, design)
        super().__init__(replace(config, recipe=str(design)), rngs=rngs)

    def descend(self, patches, masked, *, steps=None, **_):
        "All steps unrolled and stored: at this size faster than a loop on a CPU."
        x = self.encode(patches, masked)
        for _ in range(self.config.steps if steps is None else steps):
            x = self.block(x)
        return x, Trajectory(None, None)


# --- both ends against the library ---


def shaken(block: Block) -> Block:
    "The block in double precision, with all parameters moved off their start."
    leaves, tree = jax.tree.flatten(nnx.state(block, nnx.Param))
    random = np.random.default_rng(0)
    moved = [np.asarray(x) + 0.1 * random.normal(size=x.shape) for x in leaves]
    nnx.update(block, jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in moved]))
    return block


def from_library(block: Block, c: ImageConfig) -> TransformerBlock | EnergyTransformer:
    "The library's block with the weights of rung 0 or of the last."
    sizes = c.dim, c.num_heads, c.head_dim, c.num_memories
    if block.design.key_term:
        made = EnergyTransformer(*sizes, rngs=nnx.Rngs(0))
        made.norm = block.norm
        made.attention.Wq, made.attention.Wk = block.Wq, block.Wk
        made.memory.xi = block.W1
        return made
    made = TransformerBlock(*sizes, rngs=nnx.Rngs(0))
    made.norm1, made.norm2 = block.norm, block.norm2
    for letter, name in dict(q="query", k="key", v="value").items():
        layer = getattr(made.attention, name)
        layer.kernel = nnx.Param(getattr(block, f"W{letter}")[...].swapaxes(0, 1))
        layer.bias = nnx.Param(getattr(block, f"b{letter}")[:, 0])
    made.attention.out.kernel = nnx.Param(block.Wo[...].swapaxes(1, 2))
    made.attention.out.bias = block.bo
    made.up.kernel, made.up.bias = nnx.Param(block.W1[...].T), block.b1
    made.down.kernel, made.down.bias = block.W2, block.b2
    return made


def check():
    """Rung 0 is the library's `TransformerBlock`, the last rung one step of its
    `EnergyTransformer` with α = 1; its update is −∂E/∂g with relative positions too.
    """
    tiny = dict(image_size=2, patch_size=1, dim=6, num_heads=2, head_dim=3)
    c = ImageConfig(**tiny, num_memories=5)
    with float64(), jax.numpy_rank_promotion("allow"):
        x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 6)))
        first, last = (
            shaken(Block(c, RUNGS[name], rngs=nnx.Rngs(0)))
            for name in ("transformer", "key term")
        )
        # flax takes the softmax in single precision, whatever it is given
        assert_close(first(x), from_library(first, c)(x), rtol=1e-6)
        library = from_library(last, c)
        g = library.norm(x)
        assert_close(last(x), x + library.update(g), rtol=1e-12)
        assert_close(last.energy(g), library.energy(g), rtol=1e-12)
        design = replace(RUNGS["key term"], relative="distance")
        block = shaken(Block(c, design, rngs=nnx.Rngs(0)))
        assert_gradient(block.energy, g, -(block.attention(g) + block.mlp(g)))
    for kind, name in (("transformer", "transformer"), ("plain", "key term")):
        size = replace(sized(BASE.model, RUNGS[name]), recipe=kind)
        model = nnx.eval_shape(lambda: image_model(size, rngs=nnx.Rngs(0)))
        assert operations(size, RUNGS[name]) == model.flops
    assert len({operations(sized(BASE.model, d), d) for d in RUNGS.values()}) == 1


# --- runs ---


def pictures(folder: Path) -> dict[str, np.ndarray]:
    "Both splits in use as uint8 (n, S, S, C), decoded once and kept in `folder`."
    found = {}
    for split in ("train", "validation"):
        path = folder / f"{BASE.data}-{split}.npy"
        if not path.exists():
            images = load_images(BASE.data, split)[:]
            with atomic_write(path) as temporary, open(temporary, "wb") as file:
                np.save(file, images)
        found[split] = np.load(path, mmap_mode="r")
    return found | {"validation": found["validation"][: BASE.validate_on]}


def configured(images: dict[str, np.ndarray], base: TrainConfig = BASE) -> TrainConfig:
    "With the channels and the statistics of the training pictures."
    mean, std = (tuple(v.tolist()) for v in channel_statistics(images["train"]))
    channels = images["train"].shape[-1]
    return replace(
        base, model=replace(base.model, channels=channels, mean=mean, std=std)
    )


def run(config: TrainConfig, design: Design, lr: float, seed: int, images: dict):
    "Train once, scoring a few times on the way; what the run's file holds."
    wall, cpu, o = time.perf_counter(), time.process_time(), config.optim
    config = replace(config, model=sized(config.model, design), seed=seed)
    config = replace(config, optim=replace(o, lr=lr, lr_floor=o.lr_floor * lr))
    model = Model(config.model, design, rngs=nnx.Rngs(seed))
    size = lambda m: sum(p.size for p in jax.tree.leaves(nnx.state(m, nnx.Param)))
    row = {"design": asdict(design), "lr": lr, "seed": seed, "validation_mse": None}
    row |= {"parameters": size(model), "block_parameters": size(model.block)}
    score = lambda m: evaluate(
        m, images["validation"], config.num_occluded, limit=config.validate_on
    )
    try:
        history = fit(
            model,
            training_loss(config),
            lambda start: batches(
                images["train"], config.batch_size, seed=seed, start=start
            ),
            config.optim,
            seed=seed,
            validate=lambda m: {"loss": score(m).mean()},
            every=config.every,
            progress=False,
        ).history
        seen = [r for r in history if "validation_loss" in r]
        row["validation"] = [(r["step"], r["validation_loss"]) for r in seen]
        row["training"] = [(r["step"], r["loss"]) for r in history]
        row["validation_mse"] = seen[-1]["validation_loss"]
    except FloatingPointError as error:  # the loss was no longer finite
        row["diverged"] = str(error)
    row["operations"] = operations(config.model, design)
    row["seconds"] = time.perf_counter() - wall
    row["cpu_seconds"] = time.process_time() - cpu
    return row | {"config": asdict(config)}


def score(row: dict) -> float:
    "What a run ended at; infinity if it diverged."
    return float("inf") if row["validation_mse"] is None else row["validation_mse"]


def jobs(names: list[str]) -> list[tuple[str, float, int]]:
    "Name, learning rate and seed of every run, in their order."
    return [(name, LEARNING_RATE, seed) for seed in SEEDS for name in names]


def work(out: Path, names: list[str], images: dict, base: TrainConfig = BASE):
    "Make the runs that `out` lacks."
    config = configured(images, base)
    said = lambda row: f"{score(row):.4f}  {row['seconds']:.0f} s"
    for name, lr, seed in jobs(names):
        made = lambda: {"name": name, **run(config, designs()[name], lr, seed, images)}
        make(out / f"{name}-{lr:g}-{seed}.json", made, said)


def summary(out: Path):
    """Print a table: means and standard deviations over seeds, and the change from the
    rung below with the same positions (of distances, to the free table), by seed, ±
    half its 95 % interval.
    """
    done = {(row["name"], row["lr"], row["seed"]): row for row in read(out)}
    below = {}
    print("| run | parameters | MFLOP | seeds | MSE | change |")
    print("|---|---|---|---|---|---|")
    for name, design in designs().items():
        runs = {job[2]: done[job] for job in jobs([name]) if job in done}
        if not runs:
            continue
        mse = {seed: score(row) for seed, row in runs.items()}
        last = below.get(design.relative.replace("distance", "zero"), {})
        gaps = [mse[seed] - last[seed] for seed in mse if seed in last]
        below[design.relative] = mse
        row = next(iter(runs.values()))
        print(
            f"| {name} | {row['parameters']:,} | {row['operations'] / 1e6:.0f} "
            f"| {len(mse)} | {spread([*mse.values()])} "
            f"| {f'{np.mean(gaps):+.4f} ± {half_interval(gaps):.4f}' if gaps else '–'} |"
        )


def main():
    parser = options(__doc__, "image-ladder")
    add = parser.add_argument
    add("--check", action="store_true", help="check both ends, and stop")
    add("--summary", action="store_true", help="print the table so far")
    add_part(parser)
    add("--cache", type=Path, default=RUNS, help="where decoded pictures are kept")
    args = parser.parse_args()
    if args.summary:
        return summary(args.out)
    check()
    if args.check:
        return print("Both ends of the ladder are the library's blocks.")
    first = lambda name: name[0] in "07"  # both ends
    names = sorted(designs(), key=lambda name: not first(name))
    work(args.out, names[args.part], pictures(args.cache))


if __name__ == "__main__":
    main()
