"""Rivals against their published definitions, in double precision: those of the detector
of odd nodes on dense tables, those on sets of graphs node by node, however padded.
"""

import graph_rivals as rivals
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads
from scipy.special import beta as beta_function
from set_rivals import GIN, Agnostic, AgnosticConfig, GINConfig

from et_nbdev.graph.data import Graph
from et_nbdev.graph.nodes import aggregate
from et_nbdev.graph.sets import EdgeBatch
from et_nbdev.testing import assert_close

pytestmark = pytest.mark.usefixtures("x64", "compiled_once", "compile_quickly")
N = 12
DOUBLE = dict(param_dtype=jnp.float64)


def graph(symmetric=True):
    "Random, with a loop, a doubled edge and an isolated node."
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, N - 1, (2, 20))
    a, b = np.r_[a, a[0], 3], np.r_[b, b[0], 3]
    x = rng.normal(size=(N, 5)).astype(np.float32)
    found = Graph(a, b, x, np.arange(N) % 3 == 0)
    return found.symmetric() if symmetric else found


def table(graph):
    A = np.zeros((graph.num_nodes,) * 2)
    A[graph.receivers, graph.senders] = 1
    return A


def normalized(A):
    "D^-½ A D^-½; an isolated node has a row and a column of zeros."
    scale = np.diag(np.maximum(A.sum(1), 1) ** -0.5)
    return scale @ A @ scale


num = lambda param: np.asarray(param[...])


def perceptron(net, x):
    for layer in net.layers[:-1]:
        x = np.maximum(x @ num(layer.kernel) + num(layer.bias), 0)
    return x @ num(net.layers[-1].kernel) + num(net.layers[-1].bias)


def gcn(model, x, A):
    A_hat = normalized(A + np.eye(N))
    for i, layer in enumerate(model.layers):
        x = np.maximum(x, 0) if i else x
        x = A_hat @ x @ num(layer.linear.kernel) + num(layer.bias)
    return x


def wavelet(A, p, q):
    half = (np.eye(N) - normalized(A)) / 2
    power = np.linalg.matrix_power
    bands = power(half, p) @ power(np.eye(N) - half, q)
    return bands / (2 * beta_function(p + 1, q + 1))


def bwgnn(model, x, A):
    h, C = np.maximum(perceptron(model.embed, x), 0), model.order
    found = [wavelet(A, p, C - p) @ h for p in range(C + 1)]
    return perceptron(model.head, np.concatenate(found, -1))


def normed(norm, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * num(norm.scale) + num(norm.bias)


def transformer(model, x, A):
    x = x @ num(model.embed.kernel) + num(model.embed.bias)
    for layer in model.layers:
        H, D = layer.num_heads, x.shape[1]
        qkv = np.asarray(normed(layer.norm_attention, x) @ num(layer.qkv.kernel))
        Q, K, V = np.split(qkv.reshape(N, 3 * H, D // H), 3, 1)
        o = np.zeros((N, H, D // H))
        for c in range(N):
            near = np.flatnonzero(A[c])
            if len(near):
                s = np.einsum("hy,nhy->nh", Q[c], K[near]) / (D // H) ** 0.5
                w = np.exp(s - s.max(0)) / np.exp(s - s.max(0)).sum(0)
                o[c] = np.einsum("nh,nhy->hy", w, V[near])
        x = x + o.reshape(N, D) @ num(layer.out.kernel) + num(layer.out.bias)
        x = x + perceptron(layer.mlp, normed(layer.norm_mlp, x))
    return normed(model.norm, x) @ num(model.head.kernel) + num(model.head.bias)


DENSE = dict(mlp=lambda m, x, A: perceptron(m, x), gcn=gcn, bwgnn=bwgnn)
DENSE["transformer"] = transformer
KINDS = [
    *((n, {}) for n in DENSE),
    ("bwgnn", dict(order=3)),
    ("mlp", dict(num_layers=3)),
]


@pytest.mark.parametrize("name, options", KINDS)
def test_a_network_is_its_definition(name, options):
    g = graph()
    model = rivals.NETWORKS[name](5, 8, rngs=nnx.Rngs(0), **DOUBLE, **options)
    for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
        assert leaf.dtype == jnp.float64
    x, A = np.asarray(g.features, np.float64), table(g)
    run = nnx.jit(lambda model, x, edges: model(x, edges))
    edges = model.prepare(g)
    assert_close(run(model, jnp.asarray(x), edges), DENSE[name](model, x, A))
    check_grads(lambda x: model(x, edges), (jnp.asarray(x),), 1, ["rev"])


@pytest.mark.parametrize("symmetric", [True, False])
def test_means_over_neighbors(symmetric):
    g = graph(symmetric)
    A = table(g)
    mean = A / np.maximum(A.sum(1, keepdims=True), 1)
    want = np.hstack([g.features, mean @ g.features, mean @ mean @ g.features])
    want = want.astype(np.float32)
    assert_close(aggregate(g), want, rtol=1e-5, atol=1e-6)


# --- on sets of graphs

MODELS = [
    (GIN, GINConfig(5, 4, dropout=0.0)),
    (Agnostic, AgnosticConfig(6)),
    (Agnostic, AgnosticConfig(6, per_node=True)),
]
each_model = pytest.mark.parametrize("Model, config", MODELS, ids=str)


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
    linear = lambda layer, x: x @ num(layer.kernel) + num(layer.bias)
    relu = lambda x: np.maximum(x, 0)
    if isinstance(model, Agnostic):
        x = X.sum(0) if model.embed is None else relu(linear(model.embed, X)).sum(0)
        return linear(model.second, relu(linear(model.first, x)))

    def normed(norm, x):
        x = (x - num(norm.mean)) / np.sqrt(num(norm.var) + 1e-5)
        return x * num(norm.scale) + num(norm.bias)

    h, logits = X, linear(model.heads[0], X.sum(0))
    for layer, head in zip(model.layers, model.heads[1:]):
        rows = []
        for C in range(len(X)):
            x = (1 + num(layer.epsilon)) * h[C]
            x = x + sum(h[B] for B in np.flatnonzero(A[C]))
            for m, n in zip(layer.maps, layer.norms):
                x = relu(normed(n, linear(m, x)))
            rows.append(x)
        h = np.stack(rows)
        logits = logits + linear(head, h.sum(0))
    return logits


@each_model
def test_models_are_their_definition(Model, config):
    sizes = (5, 1, 7, 3)
    model = make(Model, config)
    for own, graph in zip(model(batch_of(sizes, 5, B=5)), graphs_of(sizes)):
        assert_close(own, by_hand(model, *graph), rtol=1e-10)


@each_model
def test_training_does_not_know_of_padding(Model, config):
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
