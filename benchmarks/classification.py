"""Training throughput of the graph classifier, beside the same model written as one
would first write it down, with padded tables.

Ways of this library: tables in buckets, and lists of edges. The plain way forms X ⊗ X,
convolves it and takes `jax.grad` of the energy, on random batches that are padded to the
largest graph of the *batch*, as the paper does; beside it the same with every batch
padded to the largest graph of the *set*. To tell what padding costs from what the
literal formulas cost, our model also runs on batches of both kinds. Graphs per second,
and ratios to the plain way of the paper.
"""

from functools import partial

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


class PlainClassifier(GraphClassifier):
    "The same weights and the same function; nothing is saved."

    def __call__(self, batch, rngs=None):
        c, one = self.config, dict(constant_values=True)
        x = self.tokens(batch if rngs is None else sets.flip_signs(batch, rngs.signs()))
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
    numbers = dict(rounds=5, plain_batches=4, set_batch=4)
    args = options(__doc__, "classification", data="PROTEINS", **numbers).parse_args()
    graphs, rng = sets.load_graphs(args.data), np.random.default_rng(0)
    ids, config = np.arange(len(graphs)), ClassifyTraining(args.data, model=MODEL)
    encoding = sets.learn_encoding(graphs, ids)
    features, e = (part.shape[1] for part in encoding(graphs[:1]))
    assert not e, "the plain way has no features of edges"
    positions = sets.laplacian_positions(graphs, MODEL.num_positions)

    def padded(some):
        "These graphs as one batch, padded to the largest of them."
        own = sets.laplacian_positions(graphs[some], MODEL.num_positions)
        whole = dict(num_buckets=1, batch_size=len(some), room=2**40)
        one = sets.make_buckets(graphs[some], encoding, positions=own, **whole)
        return next(one.batches(np.arange(len(some))))

    B = config.batch_size
    drawn = rng.permutation(ids)[: args.plain_batches * B]
    largest = int(graphs.sizes.argmax())
    others = rng.choice(np.setdiff1d(ids, largest), args.set_batch - 1, replace=False)
    kinds = {
        "largest of the batch": np.array_split(drawn, args.plain_batches),
        "largest of the set": [np.append(others, largest)],
    }
    tables = dict(num_buckets=config.num_buckets, batch_size=B)
    supply = {
        "buckets": sets.make_buckets(graphs, encoding, positions=positions, **tables),
        "edges": sets.EdgeLists(graphs, encoding, positions, B),
    }
    work, count = {}, dict.fromkeys(supply, len(ids))
    for name, own in supply.items():
        train, number = training(GraphClassifier, graphs, features, config), iter(ids)
        batches = lambda own=own, n=number: own.batches(ids, 0, int(next(n)))
        work[name] = lambda batches=batches, t=train: t(batches())
    for kind, each in kinds.items():
        batches = list(map(padded, each))
        for name, make in (("plain", PlainClassifier), ("our model", GraphClassifier)):
            train, way = training(make, graphs, features, config), f"{name}, {kind}"
            work[way], count[way] = partial(train, batches), sum(map(len, each))
    median = medians(in_turn(work, args.rounds))
    rate = {name: count[name] / s for name, s in median.items()}
    plain = rate["plain, largest of the batch"]
    result = {
        "data": args.data,
        "graphs_per_second": rate,
        "ratio_to_plain": {name: r / plain for name, r in rate.items()},
        "batch_size": B,
        "rounds": args.rounds,
    }
    write(args.out, result)
    for name, r in rate.items():
        print(f"{name:<32}{r:10.1f} graphs/s{r / plain:10.1f} × plain")


if __name__ == "__main__":
    main()
