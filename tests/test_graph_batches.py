"Positions, features and batches of sets of graphs: nbs/engine/sets.ipynb."

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from test_graph_sets import random_set

import et_nbdev.graph.sets as batches
from et_nbdev.graph.sets import (
    GraphSet,
    Supply,
    flip_signs,
    laplacian_positions,
    learn_encoding,
    load_graphs,
    return_probabilities,
)

pytestmark = pytest.mark.usefixtures("compile_quickly")
RINGS = load_graphs("rings")


def adjacency(graphs):
    A, both = np.zeros((graphs.num_nodes,) * 2), graphs.undirected()
    A[both.receivers, both.senders] = 1
    return A


# --- positions


@pytest.mark.parametrize("large", [200, 3])
@pytest.mark.parametrize("seed", range(2))
def test_positions_are_the_smallest_modes_of_each_graph_alone(seed, large, monkeypatch):
    "With 3, nearly everything by Lanczos' method."
    monkeypatch.setattr(batches, "_LARGE", large)
    k = 5 if large == 200 else 2
    graphs = random_set(seed, 12, 12) if large == 200 else random_set(seed, 12, 20, 0.5)
    graphs = graphs if large == 200 else graphs[graphs.sizes > 8]
    P = laplacian_positions(graphs, k)
    for one, (a, b) in zip(graphs, itertools.pairwise(graphs.start)):
        p, A = P[a:b].astype(float), adjacency(one)
        degree = A.sum(1)
        root = np.where(degree > 0, np.maximum(degree, 1) ** -0.5, 0)
        # an isolated node is a part with the eigenvalue 0
        L = np.diag((degree > 0) * 1.0) - root[:, None] * A * root
        values = np.linalg.eigvalsh(L)
        values = values[values > 1e-9][:k]
        m = len(values)
        np.testing.assert_allclose(p.T @ p, np.diag(np.arange(k) < m), atol=1e-5)
        np.testing.assert_allclose(L @ p[:, :m], p[:, :m] * values, atol=1e-5)
        # whatever stands beside it in the set, and in every call
        np.testing.assert_array_equal(laplacian_positions(one, k), P[a:b])
        for v in p[:, :m].T:
            assert v[np.abs(v) > np.abs(v).max() * (1 - 1e-5)][0] > 0


def test_positions_of_parts_and_of_almost_nothing():
    triangle = lambda s: [(s, s + 1), (s + 1, s + 2), (s + 2, s)]
    edges = np.array(triangle(0) + triangle(3)).T
    P = laplacian_positions(GraphSet([0, 7, 8, 10], *edges, [0, 0, 0]), 6)
    assert not P[6:].any() and not P[:, 4:].any()
    on = P[:3].any(0).astype(int) + P[3:6].any(0)
    assert (on == (np.arange(6) < 4)).all(), "a mode lives on one part"
    # of a pair and a path, the path's come first
    P = laplacian_positions(GraphSet([0, 7], [0, 2, 3, 4, 5], [1, 3, 4, 5, 6], [0]), 5)
    assert not P[:2, :3].any() and P[2:, :3].any(0).all() and P[:2, 3:].any()
    loop = GraphSet([0, 4], [0, 1, 2, 1, 1], [1, 2, 3, 1, 2], [0])
    both = laplacian_positions(loop.undirected(), 2)
    np.testing.assert_array_equal(laplacian_positions(loop, 2), both)
    assert laplacian_positions(loop, 0).shape == (4, 0)
    ring = GraphSet([0, 205], np.arange(205), (np.arange(205) + 1) % 205, [0])
    P = laplacian_positions(ring, 210)  # more than there are
    found = P.T.astype(float) @ P
    np.testing.assert_allclose(found, np.diag(np.arange(210) < 204), atol=1e-5)
    few = laplacian_positions(ring, 2)  # by Lanczos' method: the same plane
    np.testing.assert_allclose(few @ few.T, P[:, :2] @ P[:, :2].T, atol=1e-5)


def test_return_probabilities_are_those_of_a_random_walk():
    graphs, k = random_set(0, 12, 9), 7
    P, A = return_probabilities(graphs, k), adjacency(graphs)
    degree = A.sum(1)
    walk = A / np.maximum(degree, 1)[:, None]
    np.testing.assert_allclose(P[:, 0], np.log1p(degree), rtol=1e-6)
    for t in range(2, k + 1):
        back = np.diag(np.linalg.matrix_power(walk, t))
        np.testing.assert_allclose(P[:, t - 1], back, atol=1e-6, err_msg=str(t))
    for few in (0, 1):
        np.testing.assert_array_equal(return_probabilities(graphs, few), P[:, :few])


# --- features


def test_features_are_learned_from_training_graphs_alone():
    graphs, train = random_set(1), np.array([0, 2, 3])
    before = learn_encoding(graphs, train)
    ours = np.isin(np.repeat(np.arange(7), graphs.sizes), train)
    far = np.where(ours[:, None], graphs.node_attributes, 1e6)
    after = learn_encoding(replace(graphs, node_attributes=far), train)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    x, e = before(graphs)
    np.testing.assert_allclose(x[ours, -2:].mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(x[ours, -2:].std(0), 1, rtol=1e-5)
    assert x.dtype == e.dtype == np.float32 and e.shape == (graphs.num_edges, 3)


def test_labels_not_met_in_training_are_zeros_and_strange_ones_an_error():
    ends, names = ([0, 2], [1, 3]), dict(node_labels=[4, 9, 4, 6], edge_labels=[1, 2])
    graphs = GraphSet([0, 2, 4], *ends, [0, 1], **names)
    encoding = learn_encoding(graphs, [0])
    x, e = encoding(graphs)
    assert x.tolist() == [[1, 0, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0]]
    assert e.tolist() == [[1, 0], [0, 0]]
    for change, words in (
        (dict(node_labels=[4, 9, 4, 5]), r"node label 5 was never met.* \[4, 6, 9\]"),
        (dict(edge_labels=[1, 3]), "the edge label 3 was never met"),
        (dict(node_labels=None), "expected 1 node labels and 0 node attributes"),
    ):
        with pytest.raises(ValueError, match=words):
            encoding(replace(graphs, **change))
    flat = replace(graphs, node_attributes=np.full((4, 1), 7.0))
    # a constant is no reason to divide by zero
    assert learn_encoding(flat, [0])(flat)[0][:, 3].tolist() == [0, 0, 0, 0]
    bare = replace(graphs, node_labels=None)  # degrees, for want of anything else
    assert learn_encoding(bare, [0, 1])(bare)[0].shape == (4, 1)


# --- batches


@pytest.mark.parametrize(
    "ends",
    [
        ([0, 1, 1], [1, 0, 1]),
        ([0, 1, 0, 1], [1, 0, 1, 0]),
        ([0, 1, 0], [1, 0, 2]),
        ([0, 0, 1, 1], [1, 1, 0, 2]),
    ],
    ids="loop twice one-way balanced-but-wrong".split(),
)
def test_only_undirected_graphs_are_batched(ends):
    graphs, P = GraphSet([0, 3], *ends, [0]), np.zeros((3, 2), np.float32)
    encoding = learn_encoding(graphs, [0])
    with pytest.raises(ValueError, match=r"^graphs: .* take graphs.undirected\(\)"):
        Supply(graphs, encoding, P, 4)
    Supply(graphs.undirected(), encoding, P, 4)


def graphs_in(batch):
    "Of each graph: its label, and features, positions, A and features of edges."
    n, ends = len(batch.graph), (batch.receivers, batch.senders)
    A, L = np.zeros((n, n)), np.zeros((n, n, batch.edge_features.shape[1]))
    np.add.at(A, ends, 1)
    L[ends] = batch.edge_features
    for i, label in enumerate(batch.labels):
        here = batch.present & (batch.graph == i)
        pairs, rows = np.ix_(here, here), (batch.features, batch.positions)
        yield label, *(x[here] for x in rows), *(x[pairs] for x in (A, L))


@pytest.mark.parametrize("seed, B", [(0, 9), (1, 2), (2, 1)])
def test_a_batch_holds_what_the_set_does_and_an_epoch_every_graph_once(seed, B):
    graphs = random_set(seed, 11).undirected()
    encoding, P = learn_encoding(graphs, np.arange(5)), laplacian_positions(graphs, 3)
    x, e = encoding(graphs)
    supply = Supply(graphs, encoding, P, B)
    ids, seen = np.array([0, 3, 4, 8, 9, 10]), []
    for part in supply.plan(ids, seed=1, epoch=2):
        batch, edges = jax.tree.map(np.asarray, supply.load(part)), 0
        assert len(part) == len(batch.labels) <= B
        padding = batch.features[~batch.present], batch.positions[~batch.present]
        assert not any(map(np.any, padding))
        for g, (label, *found) in zip(part, graphs_in(batch)):
            if g < 0:
                assert label == -1 and not len(found[0])
                continue
            seen.append(g)
            nodes, one = slice(*graphs.start[[g, g + 1]]), graphs[g]
            ends, n = (one.receivers, one.senders), one.num_nodes
            A, L = np.zeros((n, n)), np.zeros((n, n, e.shape[1]))
            A[ends], L[ends] = 1, e[slice(*graphs.edge_start[[g, g + 1]])]
            edges += one.num_edges
            assert label == graphs.labels[g]
            for got, want in zip(found, (x[nodes], P[nodes], A, L)):
                np.testing.assert_allclose(got, want, rtol=1e-6)
        assert all((np.diff(a) >= 0).all() for a in (batch.receivers, batch.graph))
        last, loose = len(batch.graph) - 1, np.arange(len(batch.senders)) >= edges
        assert not batch.present[last] and not batch.edge_features[loose].any()
        assert (batch.senders[loose] == last).all()
        assert (batch.receivers[loose] == last).all()
    assert sorted(seen) == ids.tolist()


def test_plans_are_random_and_repeatable_and_even():
    how = learn_encoding(RINGS, [0]), np.zeros((RINGS.num_nodes, 0), np.float32)
    supply = Supply(RINGS, *how, 32)
    ids = np.random.default_rng(0).permutation(240)[:200]
    plan = lambda *a: [part.tolist() for part in supply.plan(ids, *a)]
    assert plan(0, 1) == plan(0, 1) and plan() == plan()
    assert plan(0, 1) != plan(0, 2) and plan(0, 1) != plan(1, 1)
    for parts in (plan(), plan(0, 1)):
        assert sorted(g for part in parts for g in part if g >= 0) == sorted(ids)
    real = [[g for g in part if g >= 0] for part in plan(0, 1)]
    nodes = [RINGS.sizes[part].sum() for part in real]
    assert np.ptp([*map(len, real)]) <= 1 and np.ptp(nodes) <= 2 * RINGS.sizes.max()
    batches = map(supply.load, supply.plan(ids, 0))
    assert len({(len(b.graph), len(b.senders)) for b in batches}) <= 4
    assert len(supply.plan(np.array([], int))) == 0 == len(supply.plan([], 0))
    per = len(plan(0, 0))  # a stream may begin anywhere
    later, parts = supply.stream(ids, 0, per + 1), supply.plan(ids, 0, 1)[1:]
    parts += supply.plan(ids, 0, 2)[:2]
    for part, batch in zip(parts, later):
        jax.tree.map(np.testing.assert_array_equal, batch, supply.load(part))
    few = RINGS[:24]
    how = learn_encoding(few, [0]), np.zeros((few.num_nodes, 0), np.float32)
    found = Supply(few, *how, 3).plan(np.arange(24), 5, 1)
    # as in version 0.2: training resumes in the same order
    frozen = [[17, 0, 8], [11, 15, 22], [12, 13, 18]]
    assert [part.tolist() for part in found[:3]] == frozen


def test_flipped_signs_are_one_for_each_graph_and_column():
    some, P = RINGS[:40], laplacian_positions(RINGS[:40], 4)
    batch = Supply(some, learn_encoding(some, [0]), P, 40).load(np.arange(40))
    flipped = flip_signs(batch, jax.random.key(3))
    same = zip(batch._fields, batch, flipped)
    assert all(a is b for key, a, b in same if key != "positions")
    before, after = (np.asarray(b.positions, float) for b in (batch, flipped))
    np.testing.assert_array_equal(np.abs(before), np.abs(after))
    products = [(before * after)[np.asarray(batch.graph) == i] for i in range(40)]
    signs = np.array([np.sign(row.sum(0)) for row in products])
    assert all((row * sign >= 0).all() for row, sign in zip(products, signs))
    assert set(np.unique(signs)) == {-1, 1} and 0.3 < (signs == 1).mean() < 0.7
