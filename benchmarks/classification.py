"""Training throughput of the graph classifier, beside the same model written as one
would first write it down, with padded tables.

The plain way forms X ⊗ X, convolves it and takes `jax.grad` of the energy, on random
batches that are padded to the largest graph of the batch, as the paper does. Graphs per
second, and ratios to the plain way.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from timing import in_turn, medians, options, trainer, write

from et_nbdev.graph import sets
from et_nbdev.graph.classify import ClassifyConfig, ClassifyTraining, GraphClassifier
from et_nbdev.graph.crossval import graph_loss

MODEL = ClassifyConfig(
    dim=32, num_heads=4, head_dim=8, num_memories=128, num_positions=8, blocks=2
)


def energy(block, g, A, mask):
    "E of all graphs, as in the paper."
    project = lambda W: jnp.einsum("bnd,hdy->bhny", g, W[...])
    Q, K = project(block.attention.Wq), project(block.attention.Wk)
    beta = block.attention.beta[None, :, None]
    scores = beta[..., None] * A * jnp.einsum("bhcy,bhny->bhcn", Q, K)
    lse = jax.nn.logsumexp(jnp.where(mask, scores, -1e9), -1)
    hidden = jax.nn.relu(jnp.einsum("bnd,kd->bnk", g, block.memory.xi[...]))
    return -jnp.sum(jnp.where(mask.any(-1), lse, 0.0) / beta) - 0.5 * jnp.sum(hidden**2)


class Tables(NamedTuple):
    "B graphs, padded to N nodes."

    features: Any  # (B, N, F)
    positions: Any  # (B, N, k)
    adjacency: Any  # (B, N, N)
    present: Any  # (B, N)
    labels: Any  # (B,)


def padded(supply, ids) -> Tables:
    "These graphs, padded to the largest of them."
    graphs, B = supply.graphs, len(ids)
    N = graphs.sizes[ids].max()
    rows = lambda a: np.zeros((B, N, a.shape[1]), np.float32)
    x, p = rows(supply.features[0]), rows(supply.positions)
    A, here = np.zeros((B, N, N), np.float32), np.zeros((B, N), bool)
    for b, i in enumerate(ids):
        one, nodes = graphs[i], slice(*graphs.start[i : i + 2])
        n = one.num_nodes
        x[b, :n], p[b, :n] = supply.features[0][nodes], supply.positions[nodes]
        here[b, :n], A[b, one.receivers, one.senders] = True, 1
    return Tables(*map(jnp.asarray, (x, p, A, here, graphs.labels[ids])))


class PlainClassifier(GraphClassifier):
    "The same weights and the same function; nothing is saved."

    def __call__(self, batch, rngs=None):
        c, one, p = self.config, dict(constant_values=True), batch.positions
        if rngs is not None:
            p = p * jax.random.rademacher(
                rngs.signs(), (len(p), 1, p.shape[2]), p.dtype
            )
        x = self.embed(batch.features) + self.place(p)
        x = jnp.where(batch.present[..., None], x, 0)
        cls = jnp.broadcast_to(self.cls[...], (len(x), 1, c.dim))
        x = jnp.concatenate([cls, x], 1)
        here = jnp.pad(batch.present, ((0, 0), (1, 0)), **one)
        linked = jnp.pad(batch.adjacency != 0, ((0, 0), (1, 0), (1, 0)), **one)
        mask = here[:, :, None] & here[:, None] & linked
        mask = (mask & ~jnp.eye(x.shape[1], dtype=bool)[None])[:, None]
        A = jax.lax.conv_general_dilated(
            x[:, :, None] * x[:, None],
            self.adjacency.filters[...],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NCHW"),
        )
        A = A + self.adjacency.bias[...][None, :, None, None]
        for block in self.blocks:
            for _ in range(c.steps):
                slope = jax.grad(lambda g: energy(block, g, A, mask))
                x = x - c.step_size * slope(block.norm(x))
                if rngs is not None:
                    noise = jax.random.normal(rngs.noise(), x.shape)
                    x = x - c.step_size * c.noise * noise
        return self.head(x[:, 0])


def training(make, graphs, features: int, config):
    "A function that trains on batches."
    sizes = features, graphs.num_classes
    model = make(*sizes, config.model, num_edge_features=0, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    loss = partial(graph_loss, share=1 / config.batch_size)
    train = trainer(graphdef, nnx.to_pure_dict(params), loss, config.optim(10**4))
    return lambda batches: list(map(train, batches))


def main():
    numbers = dict(rounds=5, plain_batches=4)
    args = options(__doc__, "classification", data="PROTEINS", **numbers).parse_args()
    graphs, rng = sets.load_graphs(args.data), np.random.default_rng(0)
    ids, config = np.arange(len(graphs)), ClassifyTraining(args.data, model=MODEL)
    encoding = sets.learn_encoding(graphs, ids)
    features, e = (part.shape[1] for part in encoding(graphs[:1]))
    assert not e, "the plain way has no features of edges"
    positions = sets.laplacian_positions(graphs, MODEL.num_positions)

    B = config.batch_size
    drawn = rng.permutation(ids)[: args.plain_batches * B]
    supply = sets.Supply(graphs, encoding, positions, B)
    ours, number = training(GraphClassifier, graphs, features, config), iter(ids)
    epoch = lambda: map(supply.load, supply.plan(ids, 0, int(next(number))))
    plain = training(PlainClassifier, graphs, features, config)
    batches = [
        padded(supply, some) for some in np.array_split(drawn, args.plain_batches)
    ]
    work = {"edges": lambda: ours(epoch()), "plain": lambda: plain(batches)}
    count = {"edges": len(ids), "plain": len(drawn)}
    median = medians(in_turn(work, args.rounds))
    rate = {name: count[name] / s for name, s in median.items()}
    result = {
        "data": args.data,
        "graphs_per_second": rate,
        "ratio_to_plain": {name: r / rate["plain"] for name, r in rate.items()},
        "batch_size": B,
        "rounds": args.rounds,
    }
    write(args.out, result)
    for name, r in rate.items():
        print(f"{name:<32}{r:10.1f} graphs/s{r / rate['plain']:10.1f} × plain")


if __name__ == "__main__":
    main()
