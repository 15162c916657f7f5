"""The baselines on sets of graphs: definitions, invariances and the limits of what a
sum can see, as in nbs/59_classification_baselines.ipynb.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.graph._set_baselines import _MaskedBatchNorm
from et_nbdev.graph.classify_baselines import GIN, Agnostic, AgnosticConfig, GINConfig
from et_nbdev.graph.sets import EdgeBatch, GraphBatch
from et_nbdev.testing import assert_close

MODELS = [
    (GIN, GINConfig(5, 4)),
    (GIN, GINConfig(6, 3, norm="layer")),
    (Agnostic, AgnosticConfig(6)),
    (Agnostic, AgnosticConfig(6, per_node=True)),
]
each_model = pytest.mark.parametrize(
    "Model, config",
    MODELS,
    ids=lambda x: (
        ""
        if isinstance(x, type)
        else type(x).__name__
        + "-layer" * (getattr(x, "norm", "") == "layer")
        + "-nodes" * getattr(x, "per_node", False)
    ),
)
pytestmark = pytest.mark.usefixtures("compile_quickly")


def shake(model, seed=0):
    graphdef, state = nnx.split(model)
    rng = np.random.default_rng(seed)

    def shaken(path, p):
        x = rng.normal(size=p.shape) / np.sqrt(max(p.shape[:1], default=1))
        return jnp.asarray(np.exp(x) if "variance" in str(path) else x, p.dtype)

    return nnx.merge(graphdef, jax.tree.map_with_path(shaken, state))


def make(Model, config, dtype=jnp.float64, F=3, C=4, seed=0):
    return shake(Model(F, C, config, param_dtype=dtype, rngs=nnx.Rngs(0)), seed)


def batch_of(sizes, N=None, B=None, seed=0, dtype=np.float64, F=3, p=0.4):
    """Random graphs of these sizes, padded to N nodes and B graphs; the same graphs
    whatever the padding.
    """
    N, B = N or max(sizes), B or len(sizes)
    x, A = np.zeros((B, N, F), dtype), np.zeros((B, N, N), dtype)
    for i, n in enumerate(sizes):
        rng = np.random.default_rng((seed, i))
        x[i, :n] = rng.normal(size=(n, F))
        half = np.triu(rng.random((n, n)) < p, 1)
        A[i, :n, :n] = half | half.T
    present = np.arange(N)[None] < np.array([*sizes, *[0] * (B - len(sizes))])[:, None]
    return GraphBatch(
        *map(
            jnp.asarray,
            (
                x,
                np.zeros((B, N, 0), dtype),
                A,
                np.zeros((B, N, N, 0), dtype),
                present,
                np.arange(B) % 4,
            ),
        )
    )


def by_hand(model, X, A):
    linear = lambda layer, x: (
        x @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])
    )
    relu = lambda x: np.maximum(x, 0)
    if isinstance(model, Agnostic):
        x = X.sum(0) if model.embed is None else relu(linear(model.embed, X)).sum(0)
        return linear(model.second, relu(linear(model.first, x)))

    def normed(norm, x):
        mean, variance = (
            (np.asarray(norm.mean[...]), np.asarray(norm.variance[...]))
            if isinstance(norm, _MaskedBatchNorm)
            else (x.mean(), x.var())
        )
        return (x - mean) / np.sqrt(variance + 1e-5) * np.asarray(
            norm.scale[...]
        ) + np.asarray(norm.bias[...])

    h, logits = X, linear(model.heads[0], X.sum(0))
    for layer, head in zip(model.layers, model.heads[1:]):
        rows = []
        for C in range(len(X)):
            x = (1 + float(layer.epsilon[...])) * h[C]
            for B in np.flatnonzero(A[C]):
                x = x + h[B]
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
    assert logits.shape == (5, 4) and jnp.isfinite(logits).all()
    for i, n in enumerate(sizes):
        assert_close(
            logits[i],
            by_hand(
                model,
                np.asarray(batch.features[i, :n]),
                np.asarray(batch.adjacency[i, :n, :n]),
            ),
            rtol=1e-10,
        )


@each_model
def test_neither_padding_nor_mates_nor_order_matter(Model, config):
    model = make(Model, config, jnp.float32)
    alone = jnp.concatenate(
        [
            model(batch_of((n,) * (i + 1), dtype=np.float32))[i:]
            for i, n in enumerate((5, 1, 7))
        ]
    )
    together = model(batch_of((5, 1, 7), N=20, B=6, dtype=np.float32))[:3]
    assert_close(together, alone, rtol=1e-6)
    batch = batch_of((7,), dtype=np.float32)
    order = np.random.default_rng(1).permutation(7)
    moved = batch._replace(
        features=batch.features[:, order],
        adjacency=batch.adjacency[:, order][:, :, order],
    )
    assert_close(model(moved), model(batch), rtol=2e-6)


def end_to_end(batch, spare=3):
    "The same graphs along edges."
    sizes = [int(n) for n in batch.present.sum(1)]
    start, B = np.concatenate([[0], np.cumsum(sizes)]), len(sizes)
    n = start[-1] + spare
    ends = np.concatenate(
        [np.argwhere(np.asarray(batch.adjacency[i])) + start[i] for i in range(B)]
    )
    ends = np.concatenate([ends, np.full((4, 2), n - 1)])
    rows = lambda x: jnp.concatenate(
        [x[i, :size] for i, size in enumerate(sizes)]
        + [jnp.zeros((spare, x.shape[-1]), x.dtype)]
    )
    graph = np.repeat(np.arange(B + 1), [*sizes, spare])
    return EdgeBatch(
        rows(batch.features),
        rows(batch.positions),
        jnp.asarray(ends[:, 1]),
        jnp.asarray(ends[:, 0]),
        jnp.zeros((len(ends), 0), batch.features.dtype),
        jnp.asarray(graph),
        jnp.asarray(graph < B),
        batch.labels,
    )


@each_model
def test_lists_of_edges_say_the_same_as_tables(Model, config, x64):
    batch = batch_of((5, 1, 7, 3), N=9)
    gradient = lambda batch: (
        make(Model, config)(batch),
        nnx.grad(lambda m: jnp.sum(jnp.sin(m(batch, rngs=nnx.Rngs(0)))))(
            make(Model, config)
        ),
    )
    config = type(config)(**{**vars(config), "dropout": 0.0})
    jax.tree.map(
        lambda a, b: assert_close(b, a, rtol=1e-9, atol=1e-12),
        gradient(batch),
        gradient(end_to_end(batch)),
    )


@each_model
def test_training_knows_neither_padding_nor_graphs_that_are_not_there(
    Model, config, x64
):
    def gradient(batch):
        model = make(Model, config)
        weights = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)))
        return nnx.grad(lambda m: jnp.sum(m(batch, rngs=nnx.Rngs(0))[:3] * weights))(
            model
        ), nnx.state(model, nnx.BatchStat)

    config = type(config)(**{**vars(config), "dropout": 0.0})
    tight = gradient(batch_of((5, 1, 7)))
    wide = gradient(batch_of((5, 1, 7), N=11, B=5))
    jax.tree.map(lambda a, b: assert_close(b, a, rtol=1e-9, atol=1e-12), tight, wide)
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(tight[0]))


def test_no_graph_at_all_is_finite():
    for Model, config in MODELS:
        empty = batch_of((), N=4, B=2, dtype=np.float32)
        model = make(Model, config, jnp.float32)
        loss = lambda m: jnp.sum(m(empty, rngs=nnx.Rngs(0)) ** 2)
        slope = nnx.jit(nnx.grad(loss))(model)
        assert all(
            jnp.isfinite(g).all()
            for g in jax.tree.leaves((model(empty), slope, nnx.state(model)))
        )


def test_batch_norm_normalizes_what_is_there_and_remembers():
    x = jax.random.normal(jax.random.key(0), (3, 6, 4)) * 3 + 2
    present = jnp.arange(6)[None] < jnp.array([6, 2, 0])[:, None]
    norm = _MaskedBatchNorm(4, momentum=0.5)
    y = norm(jnp.where(present[..., None], x, 1e6), present, True)[present]
    np.testing.assert_allclose(y.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(y.std(0), 1, rtol=1e-4)
    np.testing.assert_allclose(norm.mean[...], x[present].mean(0) / 2, rtol=1e-5)
    np.testing.assert_allclose(
        norm.variance[...], 0.5 + x[present].var(0) / 2, rtol=1e-5
    )
    before = norm.mean[...]
    used = norm(x, present, False)
    np.testing.assert_allclose(
        used,
        (np.asarray(x) - np.asarray(before)) / np.sqrt(norm.variance[...] + 1e-5),
        rtol=1e-5,
        atol=1e-6,
    )
    np.testing.assert_array_equal(norm.mean[...], before)


def fixed(*graphs):
    N = max(n for n, _ in graphs)
    A = np.zeros((len(graphs), N, N), np.float32)
    for a, (_, edges) in zip(A, graphs):
        for s, r in edges:
            a[s, r] = a[r, s] = 1
    present = np.arange(N)[None] < np.array([[n] for n, _ in graphs])
    return GraphBatch(
        *map(
            jnp.asarray,
            (
                present[..., None].astype(np.float32),
                np.zeros((len(graphs), N, 0), np.float32),
                A,
                np.zeros((len(graphs), N, N, 0), np.float32),
                present,
                np.zeros(len(graphs), int),
            ),
        )
    )


def ring(n, s=0):
    return [(s + i, s + (i + 1) % n) for i in range(n)]


@pytest.mark.parametrize(
    "pair, seen",
    [
        # the same nodes, other neighbors: a mean over neighbors is 1 everywhere
        (fixed((4, [(0, 1), (2, 3)]), (4, [(0, 1), (0, 2), (0, 3)])), True),
        (fixed((3, ring(3)), (6, ring(6))), True),
        (
            fixed((6, ring(3) + ring(3, 3)), (6, ring(6))),
            False,
        ),  # beyond color refinement
        (fixed((4, [(0, 1), (1, 2), (2, 3)]), (4, [(2, 0), (0, 3), (3, 1)])), False),
    ],
)
def test_gin_sees_what_color_refinement_sees(pair, seen):
    logits = make(GIN, GINConfig(8, 4), jnp.float32, F=1)(pair)
    assert (float(jnp.abs(logits[0] - logits[1]).max()) > 1e-3) == seen
    blind = make(Agnostic, AgnosticConfig(8), jnp.float32, F=1)(pair)
    assert bool(jnp.all(blind[0] == blind[1])) == (
        int(pair.present[0].sum()) == int(pair.present[1].sum())
    )


def test_epsilon_and_every_layer_reach_the_logits(x64):
    model, batch = make(GIN, GINConfig(5, 4)), batch_of((5, 4))
    slope = nnx.grad(lambda m: jnp.sum(m(batch) ** 2))(model)
    assert len(model.heads) == 4 and len(model.layers) == 3
    for i in range(3):
        assert float(jnp.abs(slope["layers"][i]["epsilon"][...])) > 0
    for i in range(4):
        assert bool(jnp.any(slope["heads"][i]["kernel"][...] != 0))


def test_dropout_acts_in_training_only():
    batch = batch_of((5, 4), dtype=np.float32)
    for Model, config in (
        (GIN, GINConfig(5, 3, dropout=0.5, norm="layer")),
        (Agnostic, AgnosticConfig(32, dropout=0.5)),
    ):
        model = make(Model, config, jnp.float32)
        assert_close(model(batch), model(batch), rtol=0)
        a, b, c = (model(batch, rngs=nnx.Rngs(s)) for s in (1, 2, 1))
        assert_close(a, c, rtol=0)
        assert bool(jnp.any(a != b)) and bool(jnp.any(a != model(batch)))


@pytest.mark.parametrize(
    "config",
    [GINConfig(5, 3, dropout=0.6, norm="layer"), AgnosticConfig(5, dropout=0.6)],
    ids=["GIN", "agnostic"],
)
def test_dropout_leaves_the_mean_where_it_is(config):
    batch = batch_of((5,), dtype=np.float32)
    # each of them drops for itself
    many = jax.tree.map(lambda x: jnp.repeat(x, 4000, axis=0), batch)
    model = make(
        GIN if isinstance(config, GINConfig) else Agnostic, config, jnp.float32
    )
    logits = np.asarray(model(many, rngs=nnx.Rngs(0)))
    used = np.asarray(model(batch))[0]
    error = logits.std(0) / np.sqrt(len(logits))
    assert (error > 0).all() and (np.abs(logits.mean(0) - used) < 5 * error).all()


@pytest.mark.parametrize(
    "make_it, match",
    [
        (lambda: GINConfig(hidden=0), "hidden: expected a whole number"),
        (lambda: GINConfig(num_layers=0), "num_layers: expected"),
        (lambda: GINConfig(dropout=1.0), "dropout: expected 0 ≤ dropout < 1, got 1.0"),
        (
            lambda: GINConfig(norm="none"),
            "norm: expected 'batch' or 'layer', got 'none'",
        ),
        (lambda: AgnosticConfig(hidden=-1), "hidden: expected"),
        (lambda: GIN(0, 2, rngs=nnx.Rngs(0)), "num_features: expected"),
        (lambda: Agnostic(3, 0, rngs=nnx.Rngs(0)), "num_classes: expected"),
        (
            lambda: GIN(2, 2, GINConfig(4, 2), rngs=nnx.Rngs(0))(
                batch_of((3,), dtype=np.float32)
            ),
            r"with F = 2, got \(1, 3, 3\)",
        ),
    ],
)
def test_wrong_sizes_are_named(make_it, match):
    with pytest.raises(ValueError, match=match):
        make_it()
    with pytest.raises(TypeError, match="expected a GraphBatch or an EdgeBatch, got"):
        Agnostic(3, 2, rngs=nnx.Rngs(0))(jnp.ones((2, 3)))
