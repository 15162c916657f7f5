"""The rivals on sets of graphs: their definitions, node by node, in both layouts, and
the limits of what a sum can see.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from set_rivals import GIN, Agnostic, AgnosticConfig, GINConfig

from et_nbdev.graph.sets import EdgeBatch, GraphBatch
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


def batch_of(sizes, N=None, B=None, tables=None):
    "Graphs of these sizes, padded to N nodes and B graphs."
    N, B = N or max(sizes), B or len(sizes)
    x, A = np.zeros((B, N, 3)), np.zeros((B, N, N))
    for i, n in enumerate(sizes):
        rng = np.random.default_rng(i)
        x[i, :n] = rng.normal(size=(n, 3))
        half = np.triu(rng.random((n, n)) < 0.4, 1)
        A[i, :n, :n] = half | half.T
    present = np.arange(N)[None] < np.array([*sizes, *[0] * (B - len(sizes))])[:, None]
    none = np.zeros((B, N, 0)), np.zeros((B, N, N, 0))
    arrays = x, none[0], A, none[1], present, np.arange(B) % 4
    return GraphBatch(*map(jnp.asarray, arrays))


def end_to_end(batch, spare=3):
    "The same graphs along edges."
    sizes = np.asarray(batch.present.sum(1))
    start, B = np.concatenate([[0], np.cumsum(sizes)]), len(sizes)
    ends = [np.argwhere(np.asarray(batch.adjacency[i])) + start[i] for i in range(B)]
    ends = np.concatenate([*ends, np.full((4, 2), start[-1] + spare - 1)])
    rows = lambda x: jnp.pad(x[batch.present], ((0, spare), (0, 0)))
    graph = np.repeat(np.arange(B + 1), [*sizes, spare])
    return EdgeBatch(
        rows(batch.features),
        rows(batch.positions),
        jnp.asarray(ends[:, 1]),
        jnp.asarray(ends[:, 0]),
        jnp.zeros((len(ends), 0)),
        jnp.asarray(graph),
        jnp.asarray(graph < B),
        batch.labels,
    )


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
    model, batch = make(Model, config), batch_of(sizes, N=9, B=5)
    logits = model(batch)
    for i, n in enumerate(sizes):
        X, A = batch.features[i, :n], batch.adjacency[i, :n, :n]
        want = by_hand(model, np.asarray(X), np.asarray(A))
        assert_close(logits[i], want, rtol=1e-10)


@each_model
def test_training_knows_neither_padding_nor_layout(Model, config, x64):
    "Logits, gradients and the statistics of the batch norm."

    def outcome(batch):
        model = make(Model, config)
        loss = lambda m: jnp.sum(jnp.sin(m(batch, rngs=nnx.Rngs(0))[:3]))
        with jax.numpy_dtype_promotion("standard"):  # flax averages in single precision
            slope = nnx.grad(loss)(model)
        return slope, nnx.state(model, nnx.BatchStat), model(batch)[:3]

    tight = batch_of((5, 1, 7))
    wanted = outcome(tight)
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(wanted[0]))
    for other in (batch_of((5, 1, 7), N=11, B=5), end_to_end(tight)):
        close = lambda a, b: assert_close(b, a, rtol=1e-9, atol=1e-12)
        jax.tree.map(close, wanted, outcome(other))
