"""The rivals of the detector of odd nodes against their published definitions, on dense
tables in double precision.
"""

import graph_rivals as rivals
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import beta as beta_function

from et_nbdev.graph.data import Graph
from et_nbdev.graph.nodes import aggregate
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
    assert_close(run(model, jnp.asarray(x), model.prepare(g)), DENSE[name](model, x, A))


@pytest.mark.parametrize("symmetric", [True, False])
def test_means_over_neighbors(symmetric):
    g = graph(symmetric)
    A = table(g)
    mean = A / np.maximum(A.sum(1, keepdims=True), 1)
    want = np.hstack([g.features, mean @ g.features, mean @ mean @ g.features])
    want = want.astype(np.float32)
    assert_close(aggregate(g), want, rtol=1e-5, atol=1e-6)
