"The rivals on sets of graphs: their definitions, node by node, however padded."

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from set_rivals import GIN, Agnostic, AgnosticConfig, GINConfig

from et_nbdev.graph.sets import EdgeBatch
from et_nbdev.testing import assert_close

MODELS = [
    (GIN, GINConfig(5, 4, dropout=0.0)),
    (Agnostic, AgnosticConfig(6)),
    (Agnostic, AgnosticConfig(6, per_node=True)),
]
each_model = pytest.mark.parametrize("Model, config", MODELS, ids=str)
pytestmark = pytest.mark.usefixtures("compile_quickly")


def make(Model, config, dtype=jnp.float64, F=3):
    "A model with random weights and statistics."
    model = Model(F, 4, config, param_dtype=dtype, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    rng = np.random.default_rng(0)

    def shaken(path, p):
        x = rng.normal(size=p.shape) / np.sqrt(max(p.shape[:1], default=1))
        return jnp.asarray(np.exp(x) if "var" in str(path) else x, dtype)

    return nnx.merge(graphdef, jax.tree.map_with_path(shaken, state))


def graphs_of(sizes):
    "Features and adjacency of graphs of these sizes."
    for i, n in enumerate(sizes):
        rng = np.random.default_rng(i)
        x, half = rng.normal(size=(n, 3)), np.triu(rng.random((n, n)) < 0.4, 1)
        yield x, (half | half.T) * 1.0


def batch_of(sizes, spare=1, B=None):
    "These graphs end to end, with `spare` nodes and edges more, in room for B graphs."
    xs, As = zip(*graphs_of(sizes))
    start, B = np.concatenate([[0], np.cumsum(sizes)]), B or len(sizes)
    ends = [np.argwhere(A) + s for A, s in zip(As, start)]
    ends = np.concatenate([*ends, np.full((spare, 2), start[-1] + spare - 1)])
    x = np.concatenate([*xs, np.zeros((spare, 3))])
    graph = np.repeat([*range(len(sizes)), B], [*sizes, spare])
    none = np.zeros((len(x), 0)), np.zeros((len(ends), 0))
    arrays = x, none[0], ends[:, 1], ends[:, 0], none[1], graph, graph < B
    return EdgeBatch(*map(jnp.asarray, (*arrays, np.arange(B) % 4)))


def by_hand(model, X, A):
    own = lambda p: np.asarray(p[...])
    linear = lambda layer, x: x @ own(layer.kernel) + own(layer.bias)
    relu = lambda x: np.maximum(x, 0)
    if isinstance(model, Agnostic):
        x = X.sum(0) if model.embed is None else relu(linear(model.embed, X)).sum(0)
        return linear(model.second, relu(linear(model.first, x)))

    def normed(norm, x):
        x = (x - own(norm.mean)) / np.sqrt(own(norm.var) + 1e-5)
        return x * own(norm.scale) + own(norm.bias)

    h, logits = X, linear(model.heads[0], X.sum(0))
    for layer, head in zip(model.layers, model.heads[1:]):
        rows = []
        for C in range(len(X)):
            x = (1 + own(layer.epsilon)) * h[C]
            x = x + sum(h[B] for B in np.flatnonzero(A[C]))
            for m, n in zip(layer.maps, layer.norms):
                x = relu(normed(n, linear(m, x)))
            rows.append(x)
        h = np.stack(rows)
        logits = logits + linear(head, h.sum(0))
    return logits


@each_model
def test_models_are_their_definition(Model, config, x64):
    sizes = (5, 1, 7, 3)
    model = make(Model, config)
    for own, graph in zip(model(batch_of(sizes, 5, B=5)), graphs_of(sizes)):
        assert_close(own, by_hand(model, *graph), rtol=1e-10)


@each_model
def test_training_does_not_know_of_padding(Model, config, x64):
    "Logits, gradients and the statistics of the batch norm."

    def outcome(batch):
        model = make(Model, config)
        loss = lambda m: jnp.sum(jnp.sin(m(batch, rngs=nnx.Rngs(0))[:3]))
        with jax.numpy_dtype_promotion("standard"):  # flax averages in single precision
            slope = nnx.grad(loss)(model)
        return slope, nnx.state(model, nnx.BatchStat), model(batch)[:3]

    wanted = outcome(batch_of((5, 1, 7)))
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(wanted[0]))
    close = lambda a, b: assert_close(b, a, rtol=1e-9, atol=1e-12)
    jax.tree.map(close, wanted, outcome(batch_of((5, 1, 7), 11, B=5)))
