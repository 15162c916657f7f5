"""The baselines against their published definitions: dense tables, eigendecompositions
and loops, in double precision on small random graphs.
"""

import subprocess
import sys
from functools import partial
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import beta as beta_function

from et_nbdev.graph import _baselines_engine as engine
from et_nbdev.graph._baselines_engine import (
    _edge_products,
    _neighbor_softmax_attention,
    _neighbor_sum,
    _Neighbors,
    _neighbors,
    _propagate,
    _weighted_sum,
)
from et_nbdev.graph.baselines import (
    _BASELINES,
    BWGNN,
    GCN,
    MLP,
    GraphTransformer,
    _aggregate,
    _beta_wavelets,
    fit_trees,
)
from et_nbdev.graph.data import Graph
from et_nbdev.testing import assert_close

N, F = 11, 4
OPTIONS = {
    "mlp": {},
    "gcn": dict(num_layers=3),
    "bwgnn": dict(order=3),
    "transformer": dict(num_heads=2, num_layers=1),
}
run = nnx.jit(lambda model, X, edges: model(X, edges))
each_model = pytest.mark.parametrize("name", list(_BASELINES))
pytestmark = pytest.mark.usefixtures("compile_quickly")


def random_graph(seed=0, n=N, p=0.3, loop=True):
    "Undirected; node 1 with a loop; the last one isolated."
    rng = np.random.default_rng(seed)
    A = np.triu(rng.random((n, n)) < p, 1)
    A[:, -1] = False
    if loop:
        A[1, 1] = True
    receivers, senders = np.nonzero(A | A.T)
    order = rng.permutation(len(senders))
    return Graph(
        senders[order], receivers[order], rng.normal(size=(n, F)), np.arange(n) % 2
    )


def table(graph):
    A = np.zeros((graph.num_nodes,) * 2)
    A[graph.receivers, graph.senders] = 1
    return A


def normalized(A):
    scale = np.where(A.sum(1) > 0, np.maximum(A.sum(1), 1) ** -0.5, 0)
    return scale[:, None] * A * scale[None]


def make(name, num_features=F, hidden=6, dtype=jnp.float64, seed=0, **options):
    "A model whose parameters are all random: no bias is zero, no scale one."
    model = _BASELINES[name](
        num_features,
        hidden,
        param_dtype=dtype,
        rngs=nnx.Rngs(0),
        **(OPTIONS[name] | options),
    )
    graphdef, params = nnx.split(model)
    rng = np.random.default_rng(seed)
    return nnx.merge(
        graphdef,
        jax.tree.map(
            lambda p: jnp.asarray(
                rng.normal(size=p.shape) / np.sqrt(p.shape[0]), p.dtype
            ),
            params,
        ),
    )


def linear(layer, x):
    bias = 0 if getattr(layer, "bias", None) is None else np.asarray(layer.bias[...])
    return np.asarray(x) @ np.asarray(layer.kernel[...]) + bias


def relu(x):
    return np.maximum(x, 0)


def perceptron(net, x):
    for layer in net.layers[:-1]:
        x = relu(linear(layer, x))
    return linear(net.layers[-1], x)


def layer_norm(norm, x):
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt(
        (centered**2).mean(-1, keepdims=True) + 1e-5
    ) * np.asarray(norm.scale[...]) + np.asarray(norm.bias[...])


# ------------------------------------------------------------------------------------
# sums over neighbors


@given(st.integers(0, 10**6), st.integers(1, 9), st.sampled_from([0.0, 0.3, 1.0]))
@settings(max_examples=15)
def test_rows_are_the_graph_and_reverse_turns_every_edge_round(seed, n, p):
    graph = random_graph(seed, n, p, loop=n > 2)
    edges = _neighbors(graph, by_edge=True)
    A = np.zeros((n, n))
    A[np.asarray(edges.receivers), np.asarray(edges.nodes)] = 1
    assert np.array_equal(A, table(graph)) and edges.num_nodes == n
    assert np.array_equal(np.diff(edges.start), graph.degrees)
    assert np.array_equal(
        edges.receivers[edges.reverse], edges.nodes
    ) and np.array_equal(edges.nodes[edges.reverse], edges.receivers)
    short = _neighbors(graph)
    assert (
        short.receivers is None
        and short.reverse is None
        and np.array_equal(short.nodes, edges.nodes)
    )


def test_parallel_edges_count_once():
    twice = Graph([0, 1, 0, 1, 1], [1, 0, 1, 0, 0], np.eye(2), [0, 1])
    assert _neighbors(twice).nodes.tolist() == [1, 0]


def test_directed_graphs_are_refused_by_all_that_look_at_edges():
    directed = Graph([0, 1, 2], [1, 0, 1], np.eye(3), [0, 1, 0])
    for Model in (GCN, BWGNN, GraphTransformer):
        with pytest.raises(
            ValueError,
            match=r"^graph: .*edges without their reverse.*use graph.symmetric\(\)",
        ):
            Model.prepare(directed)
        Model.prepare(directed.symmetric())
    assert MLP.prepare(directed) == ()


@pytest.mark.parametrize("seed", range(3))
def test_neighbor_sum_and_its_derivatives(x64, seed):
    graph = random_graph(seed)
    A, edges = table(graph), _neighbors(graph)
    x, dy = jnp.asarray(np.random.default_rng(seed).normal(size=(2, N, 3)))
    y, back = jax.vjp(partial(_neighbor_sum, edges), x)
    assert_close(y, A @ x)
    assert_close(back(dy)[0], A.T @ dy)
    cubed = lambda x: jnp.sum(_neighbor_sum(edges, x) ** 3)
    dense = lambda x: jnp.sum((jnp.asarray(A) @ x) ** 3)
    twice = lambda f: jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), dy))(x)
    assert_close(twice(cubed), twice(dense))
    assert_close(_propagate(edges, x), normalized(A) @ x)
    assert_close(_propagate(edges, x, self_loops=True), normalized(A + np.eye(N)) @ x)


def test_no_array_of_edges_times_width(compile_fully):
    """Compiled for the CPU, sum and attention keep nothing of the size E · D, in either
    direction.
    """
    n, D = 300, 256
    graph = random_graph(0, n, 0.9)
    edges, x = _neighbors(graph, by_edge=True), jnp.ones((n, D), jnp.float32)
    memory = lambda f, *args: (
        jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes
    )
    whole = 4 * graph.num_edges * D
    assert (
        memory(
            jax.grad(lambda x, edges: jnp.sum(_neighbor_sum(edges, x) ** 2)), x, edges
        )
        < whole / 20
    )
    heads = x.reshape(n, 2, D // 2)
    attend = jax.grad(
        lambda x, edges: jnp.sum(_neighbor_softmax_attention(edges, x, x, x) ** 2)
    )
    assert memory(attend, heads, edges) < whole / 4


# ------------------------------------------------------------------------------------
# the published definitions


def test_mlp_is_its_definition(x64):
    X = np.random.default_rng(0).normal(size=(N, F))
    for num_layers in (1, 2, 4):
        model = make("mlp", num_layers=num_layers)
        assert len(model.net.layers) == num_layers
        assert_close(model(jnp.asarray(X), ()), perceptron(model.net, X))


@pytest.mark.parametrize("hidden", [2, 9])
def test_gcn_is_its_definition(x64, hidden):
    """Kipf and Welling (2017): D̃^-1/2 (A + I) D̃^-1/2 H W, whichever product comes
    first.
    """
    graph = random_graph(1)
    model, H = make("gcn", hidden=hidden), graph.features.astype(np.float64)
    S = normalized(table(graph) + np.eye(N))
    for l, layer in enumerate(model.layers):
        H = S @ H @ np.asarray(layer.linear.kernel[...]) + np.asarray(layer.bias[...])
        H = relu(H) if l < 2 else H
    assert_close(
        run(model, jnp.asarray(graph.features, jnp.float64), GCN.prepare(graph)), H
    )


@pytest.mark.parametrize("order", [1, 2, 5])
def test_beta_wavelets_are_polynomials_of_the_laplacian(x64, order):
    """Tang et al. (2022), by the eigenvectors of L and SciPy's Beta function; they sum
    to (C + 1)/2 and each integrates to 1.
    """
    graph = random_graph(2)
    lam, U = np.linalg.eigh(np.eye(N) - normalized(table(graph)))
    h = np.random.default_rng(0).normal(size=(N, 3))
    found = _beta_wavelets(_neighbors(graph), jnp.asarray(h), order)
    assert len(found) == order + 1
    w = np.linspace(0, 2, 20001)
    for p, Wh in enumerate(found):
        bump = lambda lam: (
            (lam / 2) ** p
            * (1 - lam / 2) ** (order - p)
            / (2 * beta_function(p + 1, order - p + 1))
        )
        assert_close(Wh, U @ (bump(lam)[:, None] * (U.T @ h)))
        assert abs(np.trapezoid(bump(w), w) - 1) < 1e-6
    assert_close(sum(found), (order + 1) / 2 * h)


def test_bwgnn_is_its_definition(x64):
    graph = random_graph(3)
    model, X = make("bwgnn", order=2), graph.features.astype(np.float64)
    lam, U = np.linalg.eigh(np.eye(N) - normalized(table(graph)))
    h = relu(perceptron(model.embed, X))
    bank = [
        U
        @ np.diag((lam / 2) ** p * (1 - lam / 2) ** (2 - p) * 3 * comb(2, p) / 2)
        @ U.T
        @ h
        for p in range(3)
    ]
    assert_close(
        run(model, jnp.asarray(X), BWGNN.prepare(graph)),
        perceptron(model.head, np.hstack(bank)),
    )


@partial(jax.jit, static_argnums=0)
def _loop(A, Q, K, V):
    rows = []
    for C in range(len(A)):
        seen = [B for B, edge in enumerate(A[C]) if edge]
        if not seen:
            rows.append(jnp.zeros_like(V[0]))
            continue
        seen = np.array(seen)
        p = jax.nn.softmax(
            jnp.einsum("hy,bhy->hb", Q[C], K[seen]) / np.sqrt(Q.shape[-1]), -1
        )
        rows.append(jnp.einsum("hb,bhy->hy", p, V[seen]))
    return jnp.stack(rows)


def attention_by_loop(A, Q, K, V):
    return _loop(tuple(map(tuple, A.tolist())), *map(jnp.asarray, (Q, K, V)))


@pytest.mark.parametrize("room", [1, 2**6, 2**19])
def test_attention_is_a_loop_over_nodes_and_so_are_its_derivatives(
    x64, monkeypatch, room
):
    # pieces of one edge, of several with a rest, of all
    monkeypatch.setattr(engine, "_ROOM", room)
    graph = random_graph(4)
    A, edges = table(graph), _neighbors(graph, by_edge=True)
    Q, K, V, do = jnp.asarray(np.random.default_rng(0).normal(size=(4, N, 2, 3)))
    o, back = jax.jit(
        lambda *args: jax.vjp(partial(_neighbor_softmax_attention, edges), *args)
    )(Q, K, V)
    expected, expected_back = jax.vjp(partial(attention_by_loop, A), Q, K, V)
    assert_close(o, expected)
    for got, wanted in zip(back(do), expected_back(do)):
        assert_close(got, wanted)
    assert_close(
        _neighbor_softmax_attention(edges, 1e5 * Q, K, V),
        attention_by_loop(A, 1e5 * Q, K, V),
    )


def test_edge_products_and_weighted_sums_are_each_others_derivatives(x64):
    graph = random_graph(5)
    edges = _neighbors(graph, by_edge=True)
    r, s = np.asarray(edges.receivers), np.asarray(edges.nodes)
    rng = np.random.default_rng(0)
    Q, K = jnp.asarray(rng.normal(size=(2, N, 2, 3)))
    w = jnp.asarray(rng.normal(size=(len(r), 2)))

    def scattered(w, V):
        return jnp.zeros_like(V).at[r].add(w[..., None] * V[s])

    def gathered(Q, K):
        return jnp.einsum("ehy,ehy->eh", Q[r], K[s])

    for f, plain, args in (
        (_edge_products, gathered, (Q, K)),
        (_weighted_sum, scattered, (w, K)),
    ):
        y, back = jax.vjp(partial(f, edges), *args)
        z, plain_back = jax.vjp(plain, *args)
        assert_close(y, z)
        dy = jnp.asarray(rng.normal(size=y.shape))
        for got, wanted in zip(back(dy), plain_back(dy)):
            assert_close(got, wanted)


def test_graph_transformer_is_its_definition(x64):
    graph = random_graph(6)
    model, A = make("transformer", hidden=6, num_heads=3, num_layers=2), table(graph)
    x = linear(model.embed, graph.features.astype(np.float64))
    for layer in model.layers:
        Q, K, V = np.split(
            linear(layer.qkv, layer_norm(layer.norm_attention, x)), 3, axis=-1
        )
        heads = [
            np.asarray(
                attention_by_loop(
                    A, *(Z[:, None, 2 * h : 2 * h + 2] for Z in (Q, K, V))
                )
            )[:, 0]
            for h in range(3)
        ]
        x = x + linear(layer.out, np.hstack(heads))
        x = x + perceptron(layer.mlp, layer_norm(layer.norm_mlp, x))
    expected = linear(model.head, layer_norm(model.norm, x))
    assert_close(
        run(
            model,
            jnp.asarray(graph.features, jnp.float64),
            GraphTransformer.prepare(graph),
        ),
        expected,
    )


# ------------------------------------------------------------------------------------
# what all models share


@each_model
def test_relabeled_nodes_give_relabeled_logits(x64, name):
    graph, perm = random_graph(7), np.random.default_rng(0).permutation(N)
    place, prepare = np.argsort(perm), _BASELINES[name].prepare
    relabeled = Graph(
        place[graph.senders],
        place[graph.receivers],
        graph.features[perm],
        graph.labels[perm],
    )
    X = jnp.asarray(graph.features, jnp.float64)
    logits = run(make(name), X, prepare(graph))
    assert_close(run(make(name), X[perm], prepare(relabeled)), logits[perm])
    # the edges matter
    assert (
        name == "mlp"
        or np.abs(run(make(name), X[perm], prepare(graph)) - logits[perm]).max() > 1e-3
    )


@each_model
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_logits_and_gradients_are_finite_in_single_precision(name, p):
    "Also where nobody has a neighbor, and for enormous features."
    graph = random_graph(8, p=p, loop=False)
    model, edges = make(name, dtype=jnp.float32), _BASELINES[name].prepare(graph)
    value = nnx.jit(
        nnx.value_and_grad(lambda model, X, edges: jnp.mean(jnp.tanh(model(X, edges))))
    )
    for scale in (1.0, 1e4):
        X = jnp.asarray(scale * graph.features)
        logits = run(model, X, edges)
        assert (
            logits.shape == (N, 2)
            and logits.dtype == jnp.float32
            and jnp.isfinite(logits).all()
        )
        gradients = jax.tree.leaves(value(model, X, edges)[1])
        assert gradients and all(jnp.isfinite(leaf).all() for leaf in gradients)


@each_model
def test_edges_are_arguments_of_the_compiled_function(name):
    "Another graph of the same size runs the same program, and gives its own result."
    prepare, model = _BASELINES[name].prepare, make(name, dtype=jnp.float32)
    ring = lambda step: Graph(
        [*range(N), *((i + step) % N for i in range(N))],
        [*((i + step) % N for i in range(N)), *range(N)],
        np.random.default_rng(0).normal(size=(N, F)),
        np.arange(N) % 2,
    )
    a, b = ring(1), ring(2)
    graphdef, params = nnx.split(model)
    traces = []

    @jax.jit
    def logits(params, X, edges):
        traces.append(1)
        return nnx.merge(graphdef, params)(X, edges)

    X = jnp.asarray(a.features)
    first, second = logits(params, X, prepare(a)), logits(params, X, prepare(b))
    assert len(traces) == 1
    assert_close(second, model(X, prepare(b)), rtol=1e-5)
    assert name == "mlp" or np.abs(first - second).max() > 1e-3


@each_model
def test_dropout_needs_a_key_and_keeps_the_mean(name):
    graph = random_graph(9)
    model = make(name, dtype=jnp.float32, dropout=0.5)
    edges = _BASELINES[name].prepare(graph)
    X = jnp.asarray(graph.features)
    with_key = jax.jit(lambda key: model(X, edges, rngs=nnx.Rngs(key)))
    a, b = with_key(jax.random.key(0)), with_key(jax.random.key(1))
    assert_close(with_key(jax.random.key(0)), a)
    assert np.abs(a - b).max() > 1e-3
    # none without a key
    assert_close(model(X, edges), make(name, dtype=jnp.float32)(X, edges), rtol=1e-6)
    x = jnp.ones((200, 50))
    dropped = engine._drop(x, 0.25, nnx.Rngs(0))
    assert (
        set(np.unique(dropped).tolist()) == {0.0, float(np.float32(1 / 0.75))}
        and abs(dropped.mean() - 1) < 0.02
    )


@pytest.mark.parametrize(
    "Model, bad, match",
    [
        *[
            (Model, dict(num_features=0), "^num_features: expected a whole number")
            for Model in _BASELINES.values()
        ],
        *[(Model, dict(hidden=1.5), "^hidden: ") for Model in _BASELINES.values()],
        *[
            (Model, dict(dropout=1.0), "^dropout: expected 0 ≤ dropout < 1, got 1.0")
            for Model in _BASELINES.values()
        ],
        (MLP, dict(num_layers=0), "^num_layers: "),
        (GCN, dict(num_layers=0), "^num_layers: "),
        (GraphTransformer, dict(num_layers=0), "^num_layers: "),
        (BWGNN, dict(order=0), "^order: "),
        (
            GraphTransformer,
            dict(num_heads=5),
            "^num_heads: expected a divisor of hidden = 6, got 5",
        ),
    ],
)
def test_models_refuse_by_name(Model, bad, match):
    with pytest.raises(ValueError, match=match):
        Model(
            **(
                dict(num_features=F, hidden=6, rngs=nnx.Rngs(0))
                | ({"num_heads": 2} if Model is GraphTransformer else {})
                | bad
            )
        )


@each_model
def test_calls_refuse_by_name(name):
    graph = random_graph()
    model, edges = make(name, dtype=jnp.float32), _BASELINES[name].prepare(graph)
    with pytest.raises(
        TypeError,
        match="^features: expected an array of floating-point numbers, got int32",
    ):
        model(jnp.ones((N, F), jnp.int32), edges)
    with pytest.raises(
        ValueError,
        match=rf"^features: expected shape \(N, F\) with .*F = {F}, got \({N}, 3\)",
    ):
        model(jnp.ones((N, 3)), edges)
    with pytest.raises(ValueError, match=r"^features: expected shape"):
        model(jnp.ones((1, N, F)), edges)
    if name == "mlp":
        return
    with pytest.raises(ValueError, match=rf"^features: .*N = {N} as in edges"):
        model(jnp.ones((N + 1, F)), edges)
    with pytest.raises(
        TypeError,
        match=(
            rf"^edges: expected what {type(model).__name__}.prepare\(graph\) returns,"
            r" got tuple"
        ),
    ):
        model(jnp.ones((N, F)), ())


def test_attention_asks_for_edges_one_by_one():
    with pytest.raises(
        TypeError,
        match=(
            r"^edges: expected what GraphTransformer.prepare\(graph\) returns, got"
            r" _Neighbors without receivers and reverse"
        ),
    ):
        make("transformer", dtype=jnp.float32)(
            jnp.ones((N, F)), GCN.prepare(random_graph())
        )
    assert isinstance(GCN.prepare(random_graph()), _Neighbors)


# ------------------------------------------------------------------------------------
# trees


def test_aggregated_features_of_a_toy_graph():
    "A path 0 - 1 - 2 and a node alone."
    # one edge given twice
    path = Graph(
        [0, 1, 1, 2, 1],
        [1, 0, 2, 1, 2],
        [[0.0, 1], [10, 2], [4, 5], [7, 6]],
        [0, 0, 1, 0],
    )
    own = [[0, 1], [10, 2], [4, 5], [7, 6]]
    one = [[10, 2], [2, 3], [10, 2], [0, 0]]
    two = [[2, 3], [10, 2], [2, 3], [0, 0]]
    one_max = [[10, 2], [4, 5], [10, 2], [0, 0]]
    two_max = [[4, 5], [10, 2], [4, 5], [0, 0]]
    for hops, kinds, expected in (
        (0, ("mean",), [own]),
        (1, ("mean",), [own, one]),
        (2, ("mean",), [own, one, two]),
        (2, ("max",), [own, one_max, two_max]),
        (2, ("mean", "max"), [own, one, two, one_max, two_max]),
    ):
        found = _aggregate(path, hops, kinds)
        assert found.dtype == np.float32 and np.array_equal(found, np.hstack(expected))
    assert np.array_equal(_aggregate(path), _aggregate(path, 2, ("mean",)))


def test_aggregation_looks_along_the_edge_and_takes_negative_maxima():
    directed = Graph([0, 1], [1, 2], [[-3.0], [-2], [-1]], [0, 1, 0])
    assert _aggregate(directed, 1, ("mean", "max"))[:, 1:].tolist() == [
        [0, 0],
        [-3, -3],
        [-2, -2],
    ]
    alone = Graph([], [], np.ones((2, 1)), [0, 1])
    assert _aggregate(alone, 1, ("mean", "max")).tolist() == [[1, 0, 0], [1, 0, 0]]


@given(st.integers(0, 10**6))
@settings(max_examples=10)
def test_aggregated_features_are_those_of_the_table(seed):
    graph = random_graph(seed)
    A, X = table(graph), graph.features.astype(np.float64)
    mean = A @ X / np.maximum(A.sum(1), 1)[:, None]
    largest = lambda X: np.array(
        [X[row > 0].max(0) if row.any() else 0 * X[0] for row in A]
    )
    expected = np.hstack(
        [
            X,
            mean,
            A @ mean / np.maximum(A.sum(1), 1)[:, None],
            largest(X),
            largest(largest(X)),
        ]
    )
    assert_close(
        _aggregate(graph, 2, ("mean", "max")), expected.astype(np.float32), rtol=1e-6
    )


@pytest.fixture(scope="module")
def planted():
    "Anomalies that only their neighbors give away."
    rng = np.random.default_rng(0)
    n = 300
    x, hidden = rng.normal(size=(n, 3)), rng.random(n) < 0.1
    senders, receivers = rng.integers(0, n, (2, 900))
    # whoever knows an anomaly stands out
    x[np.r_[receivers[hidden[senders]], senders[hidden[receivers]]], 0] += 4
    return Graph(senders, receivers, x, hidden).symmetric(), rng.permutation(n)[:150]


@pytest.mark.parametrize("kind", ["forest", "boosting"])
def test_trees_are_reproducible_and_use_the_neighbors(planted, kind):
    graph, train = planted
    fit = lambda hops, seed=0, **options: fit_trees(
        kind,
        _aggregate(graph, hops),
        graph.labels,
        train,
        seed,
        n_jobs=2,
        n_estimators=40,
        **options,
    )
    p = fit(2)
    assert p.shape == (graph.num_nodes,) and ((0 <= p) & (p <= 1)).all()
    assert np.array_equal(p, fit(2))
    # boosting draws nothing unless told to
    draws = {} if kind == "forest" else {"subsample": 0.5}
    assert not np.array_equal(fit(2, **draws), fit(2, seed=1, **draws))
    rest = np.setdiff1d(np.arange(graph.num_nodes), train)
    y = graph.labels[rest] == 1
    auroc = lambda p: (p[rest][y][:, None] > p[rest][~y][None]).mean()
    # ten seeds: 0.47 ± 0.07 more with a forest, 0.42 ± 0.06 with boosting
    assert auroc(p) > auroc(fit(0)) + 0.1


@pytest.mark.parametrize("kind", ["forest", "boosting"])
def test_trees_weigh_anomalies_and_learn_from_the_training_nodes_only(planted, kind):
    graph, train = planted
    X = _aggregate(graph)
    blind = graph.labels.copy()
    blind[np.setdiff1d(np.arange(graph.num_nodes), train)] = -1
    fit = lambda X, labels, train: fit_trees(
        kind, X, labels, train, 0, n_jobs=1, n_estimators=5
    )
    assert np.array_equal(fit(X, graph.labels, train), fit(X, blind, train))
    # nothing to tell the classes apart: weighted, both are equally likely
    assert np.abs(fit(np.ones((300, 1)), graph.labels, train) - 0.5).max() < 0.1


@pytest.mark.parametrize(
    "bad, match",
    [
        (dict(kind="trees"), "^kind: expected 'forest' or 'boosting', got 'trees'"),
        (
            dict(features=np.ones(6)),
            (
                r"^features: expected numbers of shape \(N, F\), got float64 of shape"
                r" \(6,\)"
            ),
        ),
        (dict(features=np.full((6, 2), np.nan)), "^features: expected finite numbers"),
        (
            dict(labels=[0, 1]),
            (
                r"^labels: expected one for each of the 6 rows of features, got shape"
                r" \(2,\)"
            ),
        ),
        (dict(train=[]), "^train: expected ids of nodes"),
        (
            dict(train=[0, 6]),
            (
                "^train: expected ids of nodes, integers from 0 to 5, got int64 of"
                " shape .2,. from 0 to 6"
            ),
        ),
        (dict(train=np.ones(6, bool)), "^train: expected ids of nodes, .*got bool"),
        (
            dict(train=[0, 2]),
            (
                r"^train: expected nodes labeled 0 and nodes labeled 1, got the"
                r" labels \[0\]"
            ),
        ),
        (dict(train=[0, 1, 5]), r"^train: .*got the labels \[-1, 0, 1\]"),
        (dict(seed=-1), "^seed: "),
    ],
)
def test_trees_refuse_by_name(bad, match):
    good = dict(
        kind="forest",
        features=np.eye(6)[:, :2],
        labels=[0, 1, 0, 1, 0, -1],
        train=[0, 1, 2, 3],
        seed=0,
    )
    with pytest.raises(ValueError, match=match):
        fit_trees(**(good | bad))


@pytest.mark.parametrize(
    "bad, match",
    [
        (dict(hops=-1), "^hops: "),
        (dict(hops=1.5), "^hops: "),
        (dict(kinds="mean"), "^kinds: expected a tuple"),
        (dict(kinds=("mean", "sum")), "^kinds: .*got .*'sum'"),
    ],
)
def test_aggregation_refuses_by_name(bad, match):
    with pytest.raises(ValueError, match=match):
        _aggregate(random_graph(), **bad)


def test_without_xgboost_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgboost", None)
    with pytest.raises(
        ImportError,
        match=r"^kind: 'boosting' needs xgboost: pip install 'et_nbdev\[graphs\]'",
    ):
        fit_trees("boosting", np.eye(4), [0, 1, 0, 1], [0, 1], 0)


def test_importing_the_module_imports_neither_trees_nor_scipys_graphs():
    code = (
        "import sys, et_nbdev.graph.baselines; sys.exit(' '.join({'xgboost', 'sklearn'}"
        " & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
