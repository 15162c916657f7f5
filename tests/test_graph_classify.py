"""The classifier of graphs: its energy and update, what padding, batch mates and
numbering may change, and a training that never looks at the test labels.
"""

import json
from dataclasses import replace

import doors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.dynamics import descend
from et_nbdev.graph import classify
from et_nbdev.graph.batches import (
    edge_batch,
    laplacian_positions,
    learn_encoding,
    make_buckets,
    return_probabilities,
)
from et_nbdev.graph.classify import (
    ClassifyConfig,
    ClassifyTraining,
    GraphClassifier,
    _classification_loss,
    _LearnedAdjacency,
    _main,
    load_classifier,
    train_classifier,
)
from et_nbdev.graph.crossval import Fold, Scores, deal, parts
from et_nbdev.graph.energy import EdgeAttention
from et_nbdev.graph.layouts import WeightedEdges, reorder
from et_nbdev.graph.sets import GraphBatch, GraphSet, load_graphs
from et_nbdev.graph.views import attended, plot_molecule
from et_nbdev.testing import assert_close, assert_descends
from et_nbdev.training import CheckpointError

pytestmark = pytest.mark.usefixtures("compiled_once", "compile_quickly")
SIZES = dict(dim=8, num_heads=2, head_dim=4, num_memories=12, num_positions=3)
SMALL = ClassifyConfig(**SIZES, blocks=2, steps=2, step_size=0.1)
QUICK = ClassifyTraining("rings", epochs=2, batch_size=16, num_buckets=1, model=SMALL)
call = nnx.jit(lambda model, batch: model(batch))
train_call = nnx.jit(
    lambda model, batch, seed: model(batch, rngs=nnx.Rngs(jax.random.key(seed)))
)


def toys(sizes=(5, 3, 1, 4), seed=0):
    """Graphs of these sizes with two node labels, two edge labels and two classes; one
    of them has a single node.
    """
    rng, start = np.random.default_rng(seed), np.concatenate([[0], np.cumsum(sizes)])
    ends = [
        np.stack(np.nonzero(np.triu(rng.random((n, n)) < 0.7, 1))) + s
        for n, s in zip(sizes, start)
    ]
    ends = np.concatenate(ends, 1)
    return GraphSet(
        start,
        *ends,
        np.arange(len(sizes)) % 2,
        node_labels=rng.integers(0, 2, start[-1]),
        edge_labels=rng.integers(0, 2, ends.shape[1]),
    ).undirected()


def prepared(graphs=None, k=3):
    """The dense batch, the batch of edges, and a model with edge features; in double
    precision.
    """
    graphs = toys() if graphs is None else graphs
    encoding = learn_encoding(graphs, np.arange(len(graphs)))
    positions = laplacian_positions(graphs, k)
    buckets = make_buckets(graphs, encoding, positions=positions, num_buckets=1)
    double = lambda batch: jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float64 if x.dtype == np.float32 else x.dtype),
        batch,
    )
    with jax.enable_x64(False):
        dense = next(buckets.batches(np.arange(len(graphs))))
    # the buckets' order of the graphs
    order = np.asarray(buckets.plan(np.arange(len(graphs)))[0][1])
    ids = np.array([int(np.flatnonzero(buckets.row == row)[0]) for row in order])
    return double(dense), double(edge_batch(graphs, encoding, positions, ids))


def build(config=SMALL, L=2, **options):
    model = GraphClassifier(
        2,
        2,
        config,
        num_edge_features=L,
        param_dtype=jnp.float64,
        rngs=nnx.Rngs(0),
        **options,
    )
    for block in model.blocks:
        block.norm.delta[...] = jax.random.normal(
            jax.random.key(9), block.norm.delta.shape, jnp.float64
        )
    return model


def single(batch):
    "The same batch in single precision."
    lower = lambda x: x.astype(jnp.float32) if x.dtype == jnp.float64 else x
    return jax.tree.map(lower, batch)


def widen(batch, nodes=7, graphs=2):
    "The same batch with room for more nodes and graphs."
    pad = lambda x, axes: jnp.pad(
        x, [(0, graphs)] + [(0, nodes if a in axes else 0) for a in range(1, x.ndim)]
    )
    return GraphBatch(
        pad(batch.features, (1,)),
        pad(batch.positions, (1,)),
        pad(batch.adjacency, (1, 2)),
        pad(batch.edge_features, (1, 2)),
        pad(batch.present, (1,)),
        jnp.pad(batch.labels, (0, graphs), constant_values=-1),
    )


# --- weighted scores ---


def weighted():
    keys = jax.random.split(jax.random.key(0), 3)
    attention = EdgeAttention(
        6,
        3,
        5,
        beta=[0.5, 1.0, 3.0],
        init_scale=0.5,
        param_dtype=jnp.float64,
        rngs=nnx.Rngs(0),
    )
    mask = jax.random.bernoulli(keys[0], 0.6, (2, 5, 5)).at[:, 1].set(False)
    pairs = dict(weights=jax.random.normal(keys[2], (2, 3, 5, 5)), mask=mask)
    return attention, jax.random.normal(keys[1], (2, 5, 6)), pairs


def test_weights_of_one_are_no_weights_and_weights_of_zero_count_as_strangers(x64):
    attention, g, pairs = weighted()
    mask, ones = pairs["mask"], jnp.ones_like(pairs["weights"])
    assert_close(
        attention.update(g, mask=mask, weights=ones), attention.update(g, mask=mask)
    )
    energy, update = attention.energy_and_update(g, mask=mask, weights=0 * ones)
    seen = jnp.sum(mask & ~jnp.eye(5, dtype=bool)[None], -1)
    log = jnp.where(seen > 0, jnp.log(jnp.maximum(seen, 1)), 0.0)
    assert_close(energy, -(log[:, None] / attention.beta[None, :, None]).sum((1, 2)))
    assert jnp.all(update == 0)


@pytest.mark.parametrize("literal", [False, True])
def test_edges_are_a_table_written_as_a_list(x64, literal):
    "Energy and update, and what training needs: their gradient by weights and tokens."
    attention, g, pairs = weighted()
    g, weights, mask = g[0], pairs["weights"][0], pairs["mask"][0]
    r, s = np.nonzero(np.asarray(mask) & ~np.eye(5, dtype=bool))
    r, s = (np.concatenate([ends, [0, 0]]) for ends in (r, s))  # two lines of padding
    linked, table = jnp.arange(len(r)) < len(r) - 2, mask
    strangers = None
    if literal:
        strangers = jnp.asarray(4 - np.bincount(r[:-2], minlength=5))
        weights, table = jnp.where(mask[None], weights, 0.0), jnp.ones((5, 5), bool)
    ends = jnp.asarray(s), jnp.asarray(r), linked
    both = attention.energy_and_update

    def along(weights, g):
        return both(g, edges=WeightedEdges(*ends, weights[:, r, s], strangers))

    def dense(weights, g):
        return both(g, mask=table, weights=jnp.where(mask[None], weights, 0.0))

    value = lambda f: lambda w, g: jnp.sum(jnp.sin(f(w, g)[1])) + f(w, g)[0]
    slope = lambda f: jax.jit(jax.grad(value(f), (0, 1)))
    for f, h in ((along, dense), (slope(along), slope(dense))):
        jax.tree.map(assert_close, f(weights, g), h(weights, g))


def test_huge_weighted_scores_stay_finite():
    attention = EdgeAttention(4, 1, 4, beta=1.0, rngs=nnx.Rngs(0))
    g = 100 * jnp.eye(4)[:3]
    weights = 1e3 * jnp.array([[[0.0, 1, -1], [1, 0, 1], [-1, 1, 0]]])
    r, s = np.nonzero(~np.eye(3, dtype=bool))
    senders, receivers = jnp.asarray(s), jnp.asarray(r)
    edges = WeightedEdges(senders, receivers, jnp.ones(6, bool), weights[:, r, s])
    for pairs in (dict(weights=weights), dict(edges=edges)):
        f = lambda g: (
            jnp.sum(attention.energy_and_update(g, **pairs)[1] ** 2)
            + attention.energy(g, **pairs)
        )
        assert all(np.isfinite(x).all() for x in jax.jit(jax.value_and_grad(f))(g))


# --- the learned adjacency ---


@pytest.mark.parametrize("size", [1, 3, 5])
def test_the_convolution_is_that_of_the_outer_product(x64, size):
    keys = jax.random.split(jax.random.key(0), 3)
    learned = _LearnedAdjacency(
        4, 3, size, num_edge_features=2, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    learned.bias[...] = jnp.arange(3.0)
    X = jax.random.normal(keys[0], (2, 5, 4))
    e = jax.random.normal(keys[1], (2, 5, 5, 2))
    conv = jax.lax.conv_general_dilated(
        X[:, :, None] * X[:, None],
        learned.filters[...],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NCHW"),
    )
    want = (
        conv
        + jnp.arange(3.0)[None, :, None, None]
        + jnp.einsum("bckl,lh->bhck", e, learned.edge_filter[...])
    )
    assert_close(learned(X, e), want)
    r, s = np.nonzero(np.ones((5, 5)))
    graph = jnp.repeat(jnp.arange(2), 5)
    flat = lambda ends: jnp.asarray(np.concatenate([ends, ends + 5]))
    assert_close(
        learned.along(
            X.reshape(10, 4), graph, flat(s), flat(r), e.reshape(50, 2)
        ).reshape(3, 2, 5, 5),
        want.swapaxes(0, 1),
    )
    fresh = _LearnedAdjacency(4, 3, size, rngs=nnx.Rngs(0))
    assert np.array_equal(fresh(jnp.zeros((1, 2, 4))), np.ones((1, 3, 2, 2)))


# --- the model ---


def by_hand(model, batch):
    "Appendix F, graph by graph, without batches, padding or tables."
    c, logits = model.config, []
    for i in range(len(batch.labels)):
        n = int(batch.present[i].sum())
        X = jnp.concatenate(
            [
                model.cls[...][None],
                model.embed(batch.features[i, :n])
                + model.place(batch.positions[i, :n]),
            ]
        )
        tilde = np.pad(
            np.asarray(batch.adjacency[i, :n, :n]), ((1, 0), (1, 0)), constant_values=1
        )
        filters = model.adjacency.filters[...]
        conv = jax.lax.conv_general_dilated(
            (X[:, None] * X[None])[None],
            filters,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NCHW"),
        )[0]
        e = jnp.pad(batch.edge_features[i, :n, :n], ((1, 0), (1, 0), (0, 0)))
        A = (
            conv
            + model.adjacency.bias[...][:, None, None]
            + jnp.einsum("ckl,lh->hck", e, model.adjacency.edge_filter[...])
        )
        mask = tilde > 0 if c.strangers == "out" else np.ones_like(tilde, bool)
        pairs = dict(weights=A * tilde[None], mask=jnp.asarray(mask))
        for block in model.blocks:
            for _ in range(c.steps):
                X = X + c.step_size * block.update(block.norm(X), **pairs)
        logits.append(model.head(X[0]))
    return jnp.stack(logits)


@pytest.mark.parametrize("strangers", ["out", "zero"])
def test_the_model_is_appendix_f_graph_by_graph_however_it_is_batched(x64, strangers):
    dense, edges = prepared()
    model = build(replace(SMALL, strangers=strangers))
    want = by_hand(model, dense)
    assert_close(call(model, dense), want)  # batch mates and padding change nothing …
    assert_close(call(model, widen(dense))[:4], want)
    assert_close(call(model, edges), want)  # … nor do lists for tables
    loss = lambda model, batch: jnp.sum(jnp.sin(model(batch)[:4]))
    grads = [
        nnx.jit(nnx.grad(loss))(model, batch) for batch in (dense, widen(dense), edges)
    ]
    for other in grads[1:]:
        jax.tree.map(assert_close, other, grads[0])


MODELS = {
    "out": SMALL,
    "zero": replace(SMALL, strangers="zero"),
    "no memories": replace(SMALL, num_memories=0),
    "other terms": replace(
        SMALL,
        beta=2.0,
        learn_beta=True,
        normalize_heads=True,
        negative_memories=0.25,
        step_size=0.02,
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_block_descends_an_energy_that_padding_does_not_change(x64, kind):
    dense, edges = prepared()
    model = build(replace(MODELS[kind], steps=6))
    if kind == "other terms":
        for block in model.blocks:
            noise = jax.random.normal(jax.random.key(1), (12,), jnp.float64)
            block.memory.threshold[...] = noise
            block.attention.log_beta[...] = jnp.float64(0.4)
            assert block.attention.normalize and block.memory.num_negative == 3
    energies = nnx.jit(lambda model, batch: model.energies(batch))
    found = (
        energies(model, dense),
        energies(model, widen(dense)),
        energies(model, edges),
    )
    assert [len(of) for of in found] == [2, 2, 2]
    for own, wide, listed in zip(*found):
        assert ("memory" in own) == (kind != "no memories")
        assert own.total.shape == (7, 4)
        assert_descends(own.total)
        assert_close(wide.total[:, :4], own.total)
        assert_close(listed.total, own.total.sum(1))
    assert_close(call(model, edges), call(model, dense))
    one, other = (block.attention.Wq[...] for block in model.blocks)
    assert not np.array_equal(one, other)


def test_noise_signs_and_dropout_are_for_training_alone():
    dense, quiet = single(prepared()[0]), replace(SMALL, noise=0.0)
    # what differs from seed to seed, each by itself
    for config, differs in (
        (SMALL, True),
        (replace(quiet, dropout=0.5), True),
        (replace(quiet, readout="every", dropout=0.5), True),
        (quiet, True),  # signs
        (replace(quiet, num_positions=0, shuffle=True), True),
        (replace(quiet, num_positions=0), False),
        (replace(quiet, positions="returns"), False),  # have no sign
    ):
        batch = dense._replace(positions=dense.positions[..., : config.num_positions])
        model = GraphClassifier(2, 2, config, num_edge_features=2, rngs=nnx.Rngs(0))
        one, two, used = (
            *(train_call(model, batch, i) for i in (0, 1)),
            call(model, batch),
        )
        assert np.array_equal(one, two) != differs
        assert np.array_equal(used, call(model, batch))
        if not differs:
            assert_close(one, used, rtol=1e-6)


def test_a_readout_of_every_block_sums_over_the_nodes(x64):
    dense, sparse = prepared()
    config = replace(SMALL, noise=0.0, readout="every", dropout=0.0)
    model = build(config)
    assert not hasattr(model, "head") and len(model.heads) == 3
    want, x = 0.0, model.tokens(dense)
    pairs = model.pairs(x, dense)
    here = np.asarray(dense.present)
    for i, head in enumerate(model.heads):
        nodes = np.where(here[..., None], x[:, 1:], 0).sum(1)
        want = want + head(jnp.concatenate([x[:, 0], nodes], -1))
        if i < 2:
            x = descend(model.blocks[i], x, 2, 0.1, **pairs)[0]
    assert_close(call(model, dense), want)
    # padding changes nothing, nor does the layout
    assert_close(call(model, widen(dense))[: len(want)], want)
    assert_close(call(model, sparse)[: len(want)], want)


def test_training_takes_the_positions_that_the_configuration_names():
    graphs = load_graphs("rings")[np.arange(60)]
    fold = parts(deal(graphs.labels), 0)
    config = replace(QUICK, model=replace(SMALL, positions="returns"))

    def losses(positions=None):
        run = train_classifier(
            config, graphs, fold, positions=positions, progress=False
        )
        return [row["loss"] for row in run.history]

    own = losses()
    assert own == losses(return_probabilities(graphs, 3))
    assert own != losses(laplacian_positions(graphs, 3))


def test_noise_is_that_of_equation_26():
    """The noise of deviation 0.02 on the gradient moves a token by α · 0.02 in every
    step, and nothing else changes.
    """
    config = replace(
        SMALL,
        noise=0.02,
        num_positions=0,
        num_heads=1,
        num_memories=0,
        steps=1,
        blocks=1,
        step_size=0.5,
        dim=64,
    )
    model = GraphClassifier(2, 64, config, rngs=nnx.Rngs(0))
    model.head.kernel[...] = jnp.eye(64)
    batch = GraphBatch(
        jnp.zeros((200, 1, 2)),
        jnp.zeros((200, 1, 0)),
        jnp.zeros((200, 1, 1)),
        jnp.zeros((200, 1, 1, 0)),
        jnp.ones((200, 1), bool),
        jnp.zeros(200, jnp.int32),
    )
    moved = np.asarray(train_call(model, batch, 3) - call(model, batch))
    assert (
        moved.std() == pytest.approx(0.5 * 0.02, rel=0.05) and abs(moved.mean()) < 0.001
    )


def test_graphs_without_edges_and_single_nodes(x64):
    lonely = GraphSet(
        [0, 1, 4],
        np.zeros(0, int),
        np.zeros(0, int),
        [0, 1],
        node_labels=[0, 1, 0, 1],
        edge_labels=np.zeros((0, 1), int),
    )
    dense, edges = prepared(lonely)
    model = build(SMALL, L=0)
    assert_close(call(model, dense), call(model, edges))
    assert np.isfinite(call(model, dense)).all()


# --- the order of the nodes ---


def test_only_the_size_of_the_filters_makes_the_order_matter(x64):
    dense, _ = prepared(toys((6, 7, 5)))
    for size, free in ((1, True), (3, False)):
        model = build(replace(SMALL, filter_size=size))
        logits = call(model, dense)
        for seed in range(3):
            other = reorder(dense, jax.random.key(seed))
            assert np.array_equal(other.present, dense.present)
            assert not np.array_equal(other.features, dense.features)
            if free:
                assert_close(call(model, other), logits)
        if not free:
            assert np.abs(call(model, other) - logits).max() > 1e-3


# --- training ---


def test_the_loss_is_the_mean_over_graphs(x64):
    dense, _ = prepared()
    model = build(replace(SMALL, noise=0.0, num_positions=0))
    dense = dense._replace(positions=dense.positions[..., :0])
    log_p = np.asarray(jax.nn.log_softmax(call(model, dense)))
    want = -log_p[np.arange(4), np.asarray(dense.labels)].mean()
    for batch in (dense, widen(dense)):
        assert_close(
            nnx.jit(_classification_loss)(model, batch, jax.random.key(0))[0], want
        )


def test_training_repeats_never_looks_at_the_test_labels_and_resumes(tmp_path):
    graphs = load_graphs("rings")[np.arange(80)]
    fold = parts(deal(graphs.labels), 0)
    labels = graphs.labels.copy()
    labels[fold.test] = 1 - labels[fold.test]
    one = train_classifier(QUICK, graphs, fold, tmp_path, progress=False)
    other = train_classifier(
        QUICK, replace(graphs, labels=labels), fold, progress=False
    )
    assert one.validation == other.validation and one.test.accuracy == pytest.approx(
        1 - other.test.accuracy
    )
    for a, b in zip(
        jax.tree.leaves(nnx.state(one.model)), jax.tree.leaves(nnx.state(other.model))
    ):
        assert np.array_equal(a, b)
    # finds a finished run
    again = train_classifier(QUICK, graphs, fold, tmp_path, progress=False)
    assert again.test == one.test and again.best_step == one.best_step
    # but not a run on other graphs, or on another part of the same
    for other, part in (
        (replace(graphs, labels=labels), fold),
        (graphs, parts(deal(graphs.labels), 5)),
    ):
        with pytest.raises(CheckpointError, match=r"data\.(graphs|fold): '"):
            train_classifier(QUICK, other, part, tmp_path, progress=False)
    loaded = load_classifier(tmp_path / "best.safetensors")
    for a, b in zip(
        jax.tree.leaves(nnx.state(one.model)), jax.tree.leaves(nnx.state(loaded))
    ):
        assert np.array_equal(a, b)
    with pytest.raises(CheckpointError):
        load_classifier(tmp_path / "none.safetensors")


def test_the_encoding_is_learned_from_the_training_graphs_alone():
    """Attributes and labels of all other graphs may be anything: after one epoch the
    weights are the same, to the bit.
    """
    graphs = load_graphs("rings")[np.arange(60)]
    fold, rng = parts(deal(graphs.labels), 0), np.random.default_rng(0)
    measured = rng.normal(size=(graphs.num_nodes, 1))
    of_train = np.isin(np.repeat(np.arange(60), graphs.sizes), fold.train)[:, None]
    labels = graphs.node_labels.copy()
    labels[~of_train[:, 0] & (np.arange(len(labels)) % 2 == 0)] = 9
    config = replace(QUICK, epochs=1, model=replace(SMALL, blocks=1, steps=1))
    weights = []
    for attributes, kinds in (
        (measured, labels),
        (
            np.where(of_train, measured, 50.0),
            np.where(labels == 9, 9, labels * of_train),
        ),
    ):
        given = replace(graphs, node_attributes=attributes, node_labels=kinds)
        run = train_classifier(config, given, fold, progress=False)
        weights.append(jax.tree.leaves(nnx.state(run.model)))
    assert all(map(np.array_equal, *weights))


def test_validation_prefers_fewer_errors_to_smaller_losses(monkeypatch):
    """One error less outweighs any cross-entropy, which decides among equal counts; the
    history names what the choice was made by.
    """
    graphs = load_graphs("rings")[np.arange(60)]
    found = [(2 / 6, 0.1), (3 / 6, 1e6), (3 / 6, 1e5), (3 / 6, 1e5)]
    given = iter(Scores(*s) for s in (*found, (0.0, 0.0), (0.0, 0.0)))  # two reports
    monkeypatch.setattr(classify, "score", lambda logits, labels: next(given))
    fold = parts(deal(graphs.labels), 0)
    run = train_classifier(replace(QUICK, epochs=4), graphs, fold, progress=False)
    rows = [row for row in run.history if "validation_loss" in row]
    names = ("validation_accuracy", "validation_cross_entropy")
    assert [tuple(row[name] for name in names) for row in rows] == found
    assert run.best_step == rows[2]["step"]
    for row, (accuracy, _) in zip(rows, found):
        assert 1 - accuracy < row["validation_loss"] < 1 - accuracy + 1 / 6


def test_the_script_trains_reports_and_resumes(tmp_path, capsys):
    args = "--data rings --epochs 1 --num_buckets 1 --batch_size 64 --out".split()
    args += [str(tmp_path)]
    for name, size in SIZES.items():
        args += [f"--model.{name}", str(size)]
    _main(args)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["config"]["model"]["dim"] == 8 and "commit" in metrics
    assert metrics["graphs"] == {"train": 192, "validation": 24, "test": 24}
    assert f"{metrics['test']['accuracy']:.3f}" in capsys.readouterr().out
    _main(args)
    again = json.loads((tmp_path / "metrics.json").read_text())
    assert again["test"] == metrics["test"]
    for bad, message in ((["--lr", "-1"], "lr"), (["--epochs", "2"], "epochs")):
        with pytest.raises(SystemExit, match=message):
            _main([*args, *bad])


def test_a_view_adds_up_and_can_be_drawn():
    import matplotlib

    matplotlib.use("agg")
    dense = single(prepared()[0])
    model = GraphClassifier(2, 2, SMALL, num_edge_features=2, rngs=nnx.Rngs(0))
    view = attended(model, dense)
    assert view.adjacency.shape == (
        4,
        2,
        dense.present.shape[1] + 1,
        dense.present.shape[1] + 1,
    )
    assert_close(view.listens.sum(-1), np.ones((2, 4, 2), np.float32), rtol=1e-5)
    outside = ~np.asarray(dense.present)
    assert (
        view.heard[:, :, :, 1:][
            :, np.broadcast_to(outside[:, None], (4, 2, outside.shape[1]))
        ]
        == 0
    ).all()
    lone = int(dense.present.sum(1).argmin())
    assert (
        dense.present[lone].sum() == 1
        and len(plot_molecule(model, dense, lone).axes) >= 5
    )
    i = int(dense.present.sum(1).argmax())
    # a column of attributes, larger than any label's 1
    tall = dense._replace(features=dense.features.at[i, :, 1].set(7.5))
    texts = [
        text.get_text()
        for text in plot_molecule(model, tall, i, {0: "C"}).axes[0].texts
    ]
    assert (
        sorted(texts)
        == sorted(
            "C" if a == 1 else ""
            for a in np.asarray(dense.features[i, np.asarray(dense.present[i]), 0])
        )
        and "C" in texts
    )
    matplotlib.pyplot.close("all")


@pytest.mark.parametrize("normalize", [False, True])
def test_a_view_shows_the_attention_that_the_energy_has(normalize):
    "P is minus β times the slope of the energy against a bias of the scores."
    dense = single(prepared()[0])
    c = replace(SMALL, normalize_heads=normalize)
    model = GraphClassifier(2, 2, c, num_edge_features=2, rngs=nnx.Rngs(0))
    view, x = attended(model, dense), model.tokens(dense)
    pairs = model.pairs(x, dense)
    flat = jnp.zeros((len(x), c.num_heads, x.shape[1], x.shape[1]))
    for n, block in enumerate(model.blocks):
        x = descend(block, x, c.steps, c.step_size, **pairs)[0]
        g, attention = block.norm(x), block.attention
        energy = lambda bias: attention.energy(g, bias=bias, **pairs).sum()
        P = -attention.beta[None, :, None, None] * jax.grad(energy)(flat)
        assert_close(view.listens[n], P[:, :, 0], rtol=1e-4, atol=1e-6)
        assert_close(view.heard[n], P[..., 0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("config", [SMALL, QUICK], ids=["model", "training"])
def test_bad_settings_are_named(config):
    model = "dim=0 blocks=0 steps=0 step_size=0 noise=-1 dropout=1 filter_size=2"
    model += " num_positions=-1 normalize_heads=1 negative_memories=1.5 strangers='x'"
    training = "epochs=0 batch_size=0 warmup=1 layout='x' every=0 lr=-1 fold=10 seed=-1"
    with doors.unchecked():
        for change in (model if config is SMALL else training).split():
            with pytest.raises(ValueError, match=f"^{change.partition('=')[0]}\\b"):
                eval(f"replace(config, {change})")


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="shuffle"):
        replace(QUICK, layout="edges", model=replace(SMALL, shuffle=True))
    graphs = load_graphs("rings")[np.arange(20)]
    zeros = Fold(*(np.flatnonzero(graphs.labels == c)[:4] for c in (0, 1, 1)))
    unknown = replace(graphs, labels=np.where(np.arange(20) == 3, -1, graphs.labels))
    some = Fold(*np.split(np.arange(20), [10, 15]))
    for given, fold, says in (
        (graphs, zeros, "one class"),
        (unknown, some, "no label"),
    ):
        with pytest.raises(ValueError, match=says):
            train_classifier(QUICK, given, fold, progress=False)
    model, batch = GraphClassifier(2, 2, SMALL, rngs=nnx.Rngs(0)), prepared()[0]
    with pytest.raises(ValueError, match="batch.edge_features: .* axis of 0"):
        model(batch)
    with pytest.raises(ValueError, match="batch.positions: .* axis of 3"):
        model(batch._replace(positions=batch.positions[..., :2]))


def test_mutag_is_learned(et_data, tmp_path):
    """A few epochs on the real set are better than always naming the most frequent
    class.
    """
    graphs = load_graphs("MUTAG", et_data)
    model = ClassifyConfig(32, 2, 16, 64, num_positions=8, step_size=1.0)
    config = ClassifyTraining("MUTAG", 12, num_buckets=2, lr=3e-3, model=model)
    fold = parts(deal(graphs.labels), 0)
    run = train_classifier(config, graphs, fold, tmp_path, progress=False)
    most = np.bincount(graphs.labels[fold.train]).argmax()
    scores = run.validation.accuracy + run.test.accuracy
    named = [(graphs.labels[ids] == most).mean() for ids in fold[1:]]
    assert scores > sum(named)
