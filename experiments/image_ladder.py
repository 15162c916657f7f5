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

    python experiments/image_ladder.py

All runs have the same learning rate, which was tuned for none of them. Seed 0 of every
rung comes first, then the other seeds. Each run is one file in results/image-ladder,
written when it ends. A run whose file stands is not made again, so the command can be
stopped and given again at any time. `--part 0/2` and `--part 1/2` share the work
between two processes.
"""

import zlib
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import image_pair as pair
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from runs import RUNS, add_part, make, options, said_of

from et_nbdev.norm import EnergyLayerNorm
from et_nbdev.vision.model import RECIPES, ImageConfig, Parts, wave_start

LEARNING_RATE = 8e-3
SEEDS = (0, 1, 2)


RUNGS = (
    "transformer, parallel halves, no biases, no self-attention, scalar norm, tied MLP,"
    " tied values, key term"
).split(", ")


class Design(NamedTuple):
    "A block of the ladder."

    rung: str
    relative: str = "none"  # positions in the scores, their start: "zero", "distance"

    def has(self, change: str) -> bool:
        "A rung keeps the changes of those below it."
        return RUNGS.index(change) <= RUNGS.index(self.rung)


def designs() -> dict[str, Design]:
    "Everything that is trained, by the name of its files."
    found = {}
    for number, rung in enumerate(RUNGS):
        starts = (
            ("none", "zero", "distance") if rung == "key term" else ("none", "zero")
        )
        for start in starts:
            slug = f"{number}-{rung.lower().replace(' ', '-')}-{start}"
            found[slug] = Design(rung, start)
    return found


def products(c: ImageConfig, d: Design) -> int:
    "Operations of one block on one picture, without the MLP."
    N, D, HY = c.num_tokens, c.dim, c.num_heads * c.head_dim
    # products with a weight matrix: Q, K, V and O; Q, K and back through W_Q; with the
    # key term also back through W_K
    weights = 3 if d.rung == "tied values" else 4
    # products over pairs of tokens: scores, weighted values, weighted queries
    pairs = 3 if d.has("key term") else 2
    return 2 * weights * N * D * HY + 2 * pairs * N * N * HY


def sized(c: ImageConfig, d: Design) -> ImageConfig:
    "The configuration with the hidden units that make operations equal to rung 0's."
    spared = products(c, Design("transformer")) - products(c, d)
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
        norm = EnergyLayerNorm if design.has("scalar norm") else nnx.LayerNorm
        self.norm = norm(D, rngs=rngs)
        if not design.has("parallel halves"):
            self.norm2 = norm(D, rngs=rngs)
        self.Wq, self.Wk = draw("Wq", (H, D, Y), D), draw("Wk", (H, D, Y), D)
        if design.has("tied values"):
            self.Wk[...] = self.Wq[...]
        else:
            self.Wv, self.Wo = draw("Wv", (H, D, Y), D), draw("Wo", (H, D, Y), H * Y)
        self.W1 = draw("W1", (K, D), D)
        if not design.has("tied MLP"):
            self.W2 = draw("W2", (K, D), K)
        if not design.has("no biases"):
            self.bq, self.bk, self.bv = (zeros(H, 1, Y) for _ in range(3))
            self.bo, self.b1, self.b2 = zeros(D), zeros(K), zeros(D)
        if design.relative != "none":
            offset = np.arange(1 - self.side, self.side)
            distance = np.hypot(offset[:, None], offset).astype(np.float32)
            slopes = np.geomspace(0.25, 2, H) * (design.relative == "distance")
            table = jnp.asarray(-slopes[:, None, None] * distance, jnp.float32)
            self.table = nnx.Param(table)

    def scores(self, Q, K):
        "What the softmax is taken of: β K·Q + b, minus infinity where none may look."
        scores = jnp.einsum("...hcy,...hby->...hcb", Q, K) * self.head_dim**-0.5
        if self.design.relative != "none":
            row, column = np.divmod(np.arange(self.side**2), self.side)
            offset = lambda at: at[:, None] - at[None, :] + self.side - 1
            scores = scores + self.table[...][:, offset(row), offset(column)]
        if self.design.has("no self-attention"):
            scores = jnp.where(np.eye(scores.shape[-1], dtype=bool), -jnp.inf, scores)
        return scores

    def queries_and_keys(self, g):
        project = lambda W: jnp.einsum("...nd,hdy->...hny", g, W[...])
        return project(self.Wq), project(self.Wk)

    def attention(self, g):
        d = self.design
        Q, K = self.queries_and_keys(g)
        V = (
            K
            if d.has("tied values")
            else jnp.einsum("...nd,hdy->...hny", g, self.Wv[...])
        )
        if not d.has("no biases"):
            Q, K, V = Q + self.bq[...], K + self.bk[...], V + self.bv[...]
        P = jax.nn.softmax(self.scores(Q, K))
        back = lambda pull, W: jnp.einsum("...hny,hdy->...nd", pull, W[...])
        seen = jnp.einsum("...hab,...hby->...hay", P, V)
        update = back(seen, self.Wq if d.has("tied values") else self.Wo)
        if d.has("key term"):
            update += back(jnp.einsum("...hca,...hcy->...hay", P, Q), self.Wk)
        return update if d.has("no biases") else update + self.bo[...]

    def mlp(self, g):
        a = jnp.einsum("...nd,kd->...nk", g, self.W1[...])
        if not self.design.has("no biases"):
            a = a + self.b1[...]
        tied = self.design.has("tied MLP")
        h, W = (jax.nn.relu(a), self.W1) if tied else (jax.nn.gelu(a), self.W2)
        update = jnp.einsum("...nk,kd->...nd", h, W[...])
        return update if self.design.has("no biases") else update + self.b2[...]

    def __call__(self, x):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            if self.design.has("parallel halves"):
                g = self.norm(x)
                return x + self.attention(g) + self.mlp(g)
            x = x + self.attention(self.norm(x))
            return x + self.mlp(self.norm2(x))


def recipe(design: Design, c: ImageConfig, rngs) -> Parts:
    "One key whatever the design: encoder, MASK and decoder start alike in all."
    return Parts(*wave_start(c, rngs), Block(c, design, rngs=nnx.Rngs(rngs.params())))


class Model(pair.ConventionalModel):
    "The library's image model with `Block` inside."

    def __init__(self, config: ImageConfig, design: Design, *, rngs: nnx.Rngs):
        self.design = design
        RECIPES[str(design)] = partial(recipe, design)
        super().__init__(replace(config, recipe=str(design)), rngs=rngs)


# --- runs ---


def run(plan: pair.Plan, design: Design, seed: int, images: dict) -> dict:
    "Train once, scoring a few times on the way; what the run's file holds."
    job = pair.Job("transformer", plan.trial_steps, LEARNING_RATE, seed)
    config = pair.configured(plan, job, images)
    config = replace(config, model=sized(config.model, design))
    model = Model(config.model, design, rngs=nnx.Rngs(seed))

    def scores(fitted):
        rows = pair.curve(fitted.history, config.batch_size)
        return {"curve": rows, "validation_mse": rows[-1]["validation"]}

    row = {"design": design._asdict(), "operations": operations(config.model, design)}
    return row | pair.short(job, config, model, images, scores)


def main():
    parser = options(__doc__, "image-ladder")
    add_part(parser)
    args, plan = parser.parse_args(), pair.Plan()
    images, ends = pair.pictures(plan, RUNS), ("0", "7")
    names = sorted(designs(), key=lambda name: not name.startswith(ends))
    for seed, name in product(SEEDS, names[args.part]):
        made = lambda: {"name": name, **run(plan, designs()[name], seed, images)}
        make(args.out / f"{name}-{LEARNING_RATE:g}-{seed}.json", made, said_of)


if __name__ == "__main__":
    main()
