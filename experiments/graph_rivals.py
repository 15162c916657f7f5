r"""What a detector of odd nodes has to beat: four neural networks, each as its paper
defines it, and trees on the means over neighbors.

A network has two methods: `prepare(graph)` runs once, on the host, and returns the
edges as arrays, which are an argument of what is compiled; `model(features, edges)`
returns logits of normal and anomalous. `experiments/anomaly_results.py` trains and compares
them, and nbs/35_anomaly_results.ipynb tells of them. Graphs are undirected but for `MLP`.
"""

from functools import partial
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy.sparse import csr_array, diags_array, eye_array

from et_nbdev.graph.data import Graph


def prepare(graph: Graph) -> tuple:
    "Senders and receivers of the edges, (E) each, sorted by receivers."
    if not graph.is_symmetric:
        raise ValueError(f"graph: {graph!r} has edges without their reverse")
    graph = graph.simple(self_loops=True)
    order = np.lexsort((graph.senders, graph.receivers))
    ends = (graph.senders[order], graph.receivers[order])
    return tuple(jnp.asarray(end, jnp.int32) for end in ends)


def at_receivers(edges, values, N: int, add=jax.ops.segment_sum):
    "What the edges bring to each of N nodes, added up."
    return add(values, edges[1], N, indices_are_sorted=True)


def normalized(graph: Graph, self_loops: bool = False) -> tuple:
    r"""$D^{-1/2} A D^{-1/2}$, or with `self_loops` the same of $A + I$ and its degrees:
    entries, columns and starts of rows. An isolated node without one has no entries.
    """
    senders, receivers = map(np.asarray, prepare(graph))
    N = graph.num_nodes
    A = csr_array((np.ones(len(senders)), (receivers, senders)), (N, N))
    A = A + eye_array(N, format="csr") if self_loops else A
    scale = diags_array(np.maximum(A.sum(1), 1) ** -0.5)
    S = (scale @ A @ scale).tocsr()
    return tuple(map(jnp.asarray, (S.data, S.indices, S.indptr)))


@jax.custom_vjp
def propagate(S, x):
    """S x, with the table that `normalized` gives. SciPy multiplies: on the CPU it is
    faster than XLA's sums over edges.
    """

    def product(data, columns, starts, x):
        parts = map(np.asarray, (data, columns, starts))
        S = csr_array(tuple(parts), (len(x), len(x)))
        return (S @ np.asarray(x)).astype(x.dtype)

    return jax.pure_callback(product, jax.ShapeDtypeStruct(x.shape, x.dtype), *S, x)


# S is symmetric
propagate.defvjp(
    lambda S, x: (propagate(S, x), S), lambda S, g: (None, propagate(S, g))
)


class MLP(nnx.Module):
    r"""A node on its own: linear maps between the widths, with ReLU and dropout in
    between.
    """

    def __init__(
        self, num_features, hidden=64, *, num_layers=2, out=2, dropout=0.0, rngs, **kind
    ):
        sizes = num_features, *[hidden] * (num_layers - 1), out
        linear = lambda ends: nnx.Linear(*ends, rngs=rngs, **kind)
        self.layers = nnx.List(map(linear, zip(sizes, sizes[1:])))
        self.dropout = nnx.Dropout(dropout)

    @staticmethod
    def prepare(graph: Graph) -> tuple[()]:
        return ()

    def __call__(self, x, edges=(), *, rngs=None):
        for layer in self.layers[:-1]:
            x = drop(self, jax.nn.relu(layer(x)), rngs)
        return self.layers[-1](x)


def drop(model, x, rngs):
    return model.dropout(x, deterministic=rngs is None, rngs=rngs)


class Convolution(nnx.Module):
    r"$\hat A x W + b$ with $\hat A = \tilde D^{-1/2}(A+I)\tilde D^{-1/2}$."

    def __init__(self, size_in, size_out, *, rngs, **kind):
        options = dict(use_bias=False, rngs=rngs, **kind)
        self.linear = nnx.Linear(size_in, size_out, **options)
        self.bias = nnx.Param(jnp.zeros(size_out, kind.get("param_dtype", jnp.float32)))

    def __call__(self, x, S):
        if self.linear.in_features < self.linear.out_features:
            y = self.linear(propagate(S, x))  # the same, from narrower sums
        else:
            y = propagate(S, self.linear(x))
        return y + self.bias[...][None]


class GCN(nnx.Module):
    r"""Graph convolutional network (Kipf and Welling, 2017): `num_layers` times $\hat A
    H W + b$, with ReLU in between.
    """

    prepare = staticmethod(partial(normalized, self_loops=True))

    def __init__(
        self, num_features, hidden=64, *, num_layers=2, dropout=0.0, rngs, **kind
    ):
        sizes = num_features, *[hidden] * (num_layers - 1), 2
        layer = lambda ends: Convolution(*ends, rngs=rngs, **kind)
        self.layers = nnx.List(map(layer, zip(sizes, sizes[1:])))
        self.dropout = nnx.Dropout(dropout)

    def __call__(self, features, edges, *, rngs=None):
        x = self.layers[0](features, edges)
        for layer in self.layers[1:]:
            x = layer(drop(self, jax.nn.relu(x), rngs), edges)
        return x


def beta_wavelets(S, h, order: int) -> list:
    r"""$\mathcal W_{p,C-p}\,h$ for p = 0, …, C, where $\mathcal W_{p,q} = (L/2)^p
    (I-L/2)^q / (2B(p+1,q+1))$ and C = `order`, from C sparse products.
    """
    powers = [h]
    for _ in range(order):
        powers.append((powers[-1] - propagate(S, powers[-1])) / 2)

    def wavelet(p):
        total = 0.0
        for j in [*range(1, order - p + 1), 0]:
            total += comb(order - p, j) * (-1) ** j * powers[p + j]
        return (order + 1) / 2 * comb(order, p) * total

    return [wavelet(p) for p in range(order + 1)]


class BWGNN(nnx.Module):
    r"""Beta wavelet graph neural network (Tang et al., 2022): $\mathrm{MLP}(\mathcal
    W_{0,C}H \,\|\, \dots \,\|\, \mathcal W_{C,0}H)$, $H =
    \mathrm{ReLU}(\mathrm{MLP}(X))$, C = `order`.
    """

    prepare = staticmethod(normalized)

    def __init__(self, num_features, hidden=64, *, order=2, dropout=0.0, rngs, **kind):
        options = dict(dropout=dropout, rngs=rngs, **kind)
        self.order, self.dropout = order, nnx.Dropout(dropout)
        self.embed = MLP(num_features, hidden, out=hidden, **options)
        self.head = MLP((order + 1) * hidden, hidden, **options)

    def __call__(self, features, edges, *, rngs=None):
        h = drop(self, jax.nn.relu(self.embed(features, rngs=rngs)), rngs)
        bands = beta_wavelets(edges, h, self.order)
        return self.head(jnp.concatenate(bands, -1), rngs=rngs)


def neighbor_attention(edges, Q, K, V):
    r"""$o_C = \sum_{B\in N(C)} \mathrm{softmax}_B(Q_C\cdot K_B/\sqrt Y)\,V_B$ in every
    head; 0 if there are no neighbors.
    """
    B, C, N = *edges, len(Q)
    s = (Q[C] * K[B]).sum(-1) * Q.shape[-1] ** -0.5
    top = at_receivers(edges, jax.lax.stop_gradient(s), N, jax.ops.segment_max)
    e = jnp.exp(s - top[C])
    z = at_receivers(edges, e, N)
    o = at_receivers(edges, e[..., None] * V[B], N)
    return o / jnp.where(z == 0, jnp.ones_like(z), z)[..., None]


class LayerNorm(nnx.Module):
    "With one scale and one shift per entry."

    def __init__(self, size, kind):
        dtype = kind.get("param_dtype", jnp.float32)
        self.scale = nnx.Param(jnp.ones(size, dtype))
        self.bias = nnx.Param(jnp.zeros(size, dtype))

    def __call__(self, x):
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)
        return x * self.scale[...][None] + self.bias[...][None]


class TransformerLayer(nnx.Module):
    "x + W_O attention(norm(x)), then x + MLP(norm(x))."

    def __init__(self, hidden, num_heads, *, dropout, rngs, **kind):
        options = dict(rngs=rngs, **kind)
        self.num_heads, self.dropout = num_heads, nnx.Dropout(dropout)
        self.norm_attention, self.norm_mlp = (LayerNorm(hidden, kind) for _ in range(2))
        self.qkv = nnx.Linear(hidden, 3 * hidden, use_bias=False, **options)
        self.out = nnx.Linear(hidden, hidden, **options)
        self.mlp = MLP(hidden, 2 * hidden, out=hidden, dropout=dropout, **options)

    def __call__(self, x, edges, rngs=None):
        qkv = self.qkv(self.norm_attention(x))
        heads = jnp.split(qkv.reshape(len(x), 3 * self.num_heads, -1), 3, 1)
        o = neighbor_attention(edges, *heads).reshape(x.shape)
        x = x + drop(self, self.out(o), rngs)
        return x + drop(self, self.mlp(self.norm_mlp(x), rngs=rngs), rngs)


class GraphTransformer(nnx.Module):
    """Transformer whose attention runs along the edges (after Dwivedi and Bresson,
    2021, with the norms first and no positions).
    """

    prepare = staticmethod(prepare)

    def __init__(
        self,
        num_features,
        hidden=64,
        *,
        num_heads=4,
        num_layers=2,
        rngs,
        dropout=0.0,
        **kind,
    ):
        options = dict(rngs=rngs, **kind)
        self.embed = nnx.Linear(num_features, hidden, **options)
        layer = lambda: TransformerLayer(hidden, num_heads, dropout=dropout, **options)
        self.layers = nnx.List([layer() for _ in range(num_layers)])
        self.norm = LayerNorm(hidden, kind)
        self.head = nnx.Linear(hidden, 2, **options)

    def __call__(self, features, edges, *, rngs=None):
        x = self.embed(features)
        for layer in self.layers:
            x = layer(x, edges, rngs)
        return self.head(self.norm(x))


NETWORKS = {"mlp": MLP, "gcn": GCN, "bwgnn": BWGNN, "transformer": GraphTransformer}


def fit_trees(kind: str, features, labels, train, seed: int, **options) -> np.ndarray:
    """Probability of being anomalous for every node, from a "forest" of scikit-learn or
    xgboost's "boosting" fitted on the nodes `train`, with anomalies weighted by #normal
    / #anomalous; reproducible for a seed and a number of threads.
    """
    if kind == "forest":
        from sklearn.ensemble import RandomForestClassifier as Trees
    else:
        from xgboost import XGBClassifier as Trees
    y = labels[train]
    weight = np.where(y == 1, (y == 0).sum() / (y == 1).sum(), 1.0)
    model = Trees(**{"random_state": seed, "n_jobs": -1} | options)
    model.fit(features[train], y, sample_weight=weight)
    return model.predict_proba(features)[:, 1]
