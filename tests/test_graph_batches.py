"Positions, features and batches of sets of graphs: nbs/87_set_batches.ipynb."

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from test_graph_sets import random_set

import et_nbdev.graph.batches as batches
from et_nbdev.graph.batches import (
    EdgeLists,
    bucket_sizes,
    cached_positions,
    edge_batch,
    flip_signs,
    in_layout,
    laplacian_positions,
    learn_encoding,
    make_buckets,
    return_probabilities,
    take,
)
from et_nbdev.graph.sets import GraphSet, load_graphs

pytestmark = pytest.mark.usefixtures("compile_quickly")


def adjacency(graphs):
    A, both = np.zeros((graphs.num_nodes,) * 2), graphs.undirected()
    A[both.receivers, both.senders] = 1
    return A


# --- positions


@pytest.mark.parametrize("large", [200, 3])
@pytest.mark.parametrize("seed", range(3))
def test_positions_are_the_smallest_modes_of_each_graph_alone(seed, large, monkeypatch):
    "With 3, nearly everything by Lanczos' method."
    monkeypatch.setattr(batches, "_LARGE", large)
    k, graphs = (
        (5, random_set(seed, 12, 12))
        if large == 200
        else (2, random_set(seed, 12, 20, 0.5))
    )
    graphs = graphs if large == 200 else graphs[graphs.sizes > 8]
    P = laplacian_positions(graphs, k)
    assert P.dtype == np.float32
    np.testing.assert_array_equal(laplacian_positions(graphs, k), P)
    for i in range(len(graphs)):
        p, A = (
            P[graphs.start[i] : graphs.start[i + 1]].astype(float),
            adjacency(graphs[i]),
        )
        degree = A.sum(1)
        root = np.where(degree > 0, np.maximum(degree, 1) ** -0.5, 0)
        # an isolated node is a part with the eigenvalue 0
        L = np.diag((degree > 0) * 1.0) - root[:, None] * A * root
        values = np.linalg.eigvalsh(L)
        values = values[values > 1e-9][:k]
        m = len(values)
        np.testing.assert_allclose(p.T @ p, np.diag(np.arange(k) < m), atol=1e-5)
        np.testing.assert_allclose(L @ p[:, :m], p[:, :m] * values, atol=1e-5)
        # whatever stands beside it in the set
        np.testing.assert_array_equal(laplacian_positions(graphs[i], k), p)
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
    for positions in (laplacian_positions, return_probabilities):
        with pytest.raises(ValueError, match="k: expected"):
            positions(loop, -1)


def test_all_modes_of_a_large_part_can_be_asked_for():
    ring = GraphSet([0, 205], np.arange(205), (np.arange(205) + 1) % 205, [0])
    P = laplacian_positions(ring, 210)  # more than there are
    found = P.T.astype(float) @ P
    np.testing.assert_allclose(found, np.diag(np.arange(210) < 204), atol=1e-5)
    few = laplacian_positions(ring, 2)  # by Lanczos' method: the same plane
    np.testing.assert_allclose(few @ few.T, P[:, :2] @ P[:, :2].T, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_return_probabilities_are_those_of_a_random_walk(seed):
    graphs, k = random_set(seed, 12, 9), 7
    P, A = return_probabilities(graphs, k), adjacency(graphs)
    degree = A.sum(1)
    walk = A / np.maximum(degree, 1)[:, None]
    np.testing.assert_allclose(P[:, 0], np.log1p(degree), rtol=1e-6)
    for t in range(2, k + 1):
        back = np.diag(np.linalg.matrix_power(walk, t))
        np.testing.assert_allclose(P[:, t - 1], back, atol=1e-6, err_msg=str(t))
    for few in (0, 1):
        np.testing.assert_array_equal(return_probabilities(graphs, few), P[:, :few])


def test_positions_are_kept_and_damage_is_mended(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    graphs = random_set(3)
    want = laplacian_positions(graphs, 3)
    again = lambda g=graphs, k=3, kind="eigenvectors": cached_positions(g, k, kind, 1)

    def boom(*a):
        raise AssertionError("computed again")

    np.testing.assert_array_equal(again(), want)
    (kept,) = tmp_path.rglob("*.npz")
    with monkeypatch.context() as m:
        for kind in ("eigenvectors", "returns"):
            m.setitem(batches._KINDS, kind, boom)
        np.testing.assert_array_equal(again(), want)
        turned = replace(graphs, senders=graphs.receivers, receivers=graphs.senders)
        for other in (
            lambda: again(k=2),
            lambda: again(kind="returns"),
            lambda: again(graphs.undirected()),
            lambda: again(turned),
            lambda: cached_positions(graphs, 3),  # a small set is not kept
        ):
            with pytest.raises(AssertionError, match="computed again"):
                other()
        m.setattr(batches, "_VERSION", -1)  # and another version of the method
        with pytest.raises(AssertionError, match="computed again"):
            again()
    for damage in (
        lambda: kept.write_bytes(kept.read_bytes()[:-30]),
        lambda: np.savez(kept, positions=want[1:]),
        lambda: np.savez(kept, other=want),
    ):
        damage()
        np.testing.assert_array_equal(again(), want)
        with np.load(kept) as mended:
            np.testing.assert_array_equal(mended["positions"], want)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="positions are not kept in"):
        np.testing.assert_array_equal(again(), want)


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
    far = np.where(ours[:, None], graphs.node_attributes, 3e38)
    tight = before._replace(node=before.node._replace(scale=np.float32([1e-6, 1])))
    with np.errstate(over="ignore"), pytest.raises(ValueError, match="finite.*got inf"):
        tight(replace(graphs, node_attributes=far))


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
    with pytest.raises(ValueError, match="^train: must hold ids of graphs from 0 to 1"):
        learn_encoding(graphs, [7])


# --- batches


@pytest.mark.parametrize("layout", ["dense", "edges"])
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
def test_only_edges_that_tables_and_lists_agree_on_are_batched(layout, ends):
    graphs, P = GraphSet([0, 3], *ends, [0]), np.zeros((3, 2), np.float32)
    encoding = learn_encoding(graphs, [0])
    with pytest.raises(ValueError, match=r"^graphs: .* take graphs.undirected\(\)"):
        in_layout(layout, graphs, encoding, P, 4)
    in_layout(layout, graphs.undirected(), encoding, P, 4)
    for p in (P[:2], P[0], P + np.nan):
        with pytest.raises(ValueError, match="^positions: must"):
            in_layout(layout, graphs.undirected(), encoding, p, 4)
    with pytest.raises(ValueError, match="^batch_size: expected"):
        in_layout(layout, graphs.undirected(), encoding, P, 0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 4))
@examples(40)
def test_bucket_sizes_are_the_best_there_are(sizes, K):
    work = lambda ends: sum(
        n * (n + 64) for n in np.take(ends, np.searchsorted(ends, sizes))
    )
    ends, all_ends = bucket_sizes(sizes, K, 1), sorted(set(sizes))
    assert len(ends) <= K and set(ends) <= set(sizes) and ends[-1] == max(sizes)
    choices = [
        itertools.combinations(all_ends, m) for m in range(min(K, len(all_ends)))
    ]
    assert work(ends) == min(work(sorted({*c, max(sizes)})) for m in choices for c in m)
    assert all(n % 4 == 0 for n in bucket_sizes(sizes, K))


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 9))
@examples(8)
def test_a_batch_holds_what_the_set_does_and_an_epoch_every_graph_once(seed, K, B):
    graphs = random_set(seed, 11).undirected()
    encoding, P = learn_encoding(graphs, np.arange(5)), laplacian_positions(graphs, 3)
    x, e = encoding(graphs)
    buckets = make_buckets(graphs, encoding, positions=P, num_buckets=K, batch_size=B)
    ids, seen = np.array([0, 3, 4, 8, 9, 10]), []
    for part in buckets.plan(ids, seed=1, epoch=2):
        batch = jax.tree.map(np.asarray, take(*buckets.load(part)))
        assert len(part[1]) == buckets.batch_sizes[part[0]] <= B
        for i, g in enumerate(buckets.members(part)):
            one = jax.tree.map(lambda a: a[i], batch)
            if g < 0:
                assert one.labels == -1 and not any(np.any(a) for a in one[:5])
                continue
            seen.append(g)
            (s, t), n, part_g = graphs.start[[g, g + 1]], graphs.sizes[g], graphs[g]
            assert one.labels == graphs.labels[g]
            np.testing.assert_array_equal(one.present, np.arange(len(one.present)) < n)
            for have, want in ((one.features, x[s:t]), (one.positions, P[s:t])):
                np.testing.assert_array_equal(have[:n], want)
                assert not have[n:].any()
            A, L = np.zeros_like(one.adjacency), np.zeros_like(one.edge_features)
            A[part_g.receivers, part_g.senders] = 1
            own = slice(*graphs.edge_start[[g, g + 1]])
            L[part_g.receivers, part_g.senders] = e[own]
            np.testing.assert_array_equal(one.adjacency, A)
            np.testing.assert_array_equal(one.edge_features, L)
    assert sorted(seen) == ids.tolist()


@pytest.mark.parametrize("layout", ["dense", "edges"])
def test_plans_are_random_and_repeatable_and_even(layout):
    rings = load_graphs("rings")
    how = learn_encoding(rings, [0]), np.zeros((rings.num_nodes, 0), np.float32)
    supply = in_layout(layout, rings, *how, 32, num_buckets=3, room=24 * 24 * 8)
    ids = np.random.default_rng(0).permutation(240)[:200]
    plan = lambda *a: [supply.members(p).tolist() for p in supply.plan(ids, *a)]
    assert plan(0, 1) == plan(0, 1) and plan() == plan()
    assert plan(0, 1) != plan(0, 2) and plan(0, 1) != plan(1, 1)
    for parts in (plan(), plan(0, 1)):
        assert sorted(g for part in parts for g in part if g >= 0) == sorted(ids)
    filled = lambda parts: [sum(g >= 0 for g in part) for part in parts]
    if layout == "dense":
        for bucket, B in zip(supply.buckets, supply.batch_sizes):
            assert B * bucket.adjacency.shape[1] ** 2 <= 24 * 24 * 8
    else:
        nodes = [rings.sizes[[g for g in part if g >= 0]].sum() for part in plan(0, 1)]
        assert (
            np.ptp(filled(plan(0, 1))) <= 1 and np.ptp(nodes) <= 2 * rings.sizes.max()
        )
        shapes = {(len(b.graph), len(b.senders)) for b in supply.batches(ids, 0)}
        assert len(shapes) <= 4
    assert len(supply.plan(np.array([], int))) == 0 == len(supply.plan([], 0))
    with pytest.raises(
        ValueError, match="^ids: .*ids of graphs from 0 to 239, got 240"
    ):
        supply.plan([240])


# of the library before it was written anew: training resumes in the same order
FROZEN_LISTS = [[17, 0, 8], [11, 15, 22], [12, 13, 18]]
FROZEN_BUCKETS = [[21, 3, 1], [19, 14, 18], [2, 6, 9]]


def test_the_order_of_an_epoch_is_frozen():
    rings = load_graphs("rings")[:24]
    encoding, P = learn_encoding(rings, [0]), np.zeros((rings.num_nodes, 0), np.float32)
    lists = EdgeLists(rings, encoding, P, 3)
    assert [part.tolist() for part in lists.plan(np.arange(24), 5, 1)][
        :3
    ] == FROZEN_LISTS
    buckets = make_buckets(rings, encoding, positions=P, num_buckets=2, batch_size=3)
    found = [buckets.members(p).tolist() for p in buckets.plan(np.arange(24), 5, 1)]
    assert found[:3] == FROZEN_BUCKETS


@given(st.integers(0, 2**31))
@examples(5)
def test_edges_end_to_end_say_what_the_tables_say(seed):
    graphs = random_set(seed).undirected()
    encoding, P = learn_encoding(graphs, np.arange(7)), laplacian_positions(graphs, 2)
    ids = np.array([5, 0, 2])
    nodes, edges = graphs[ids].num_nodes, graphs[ids].num_edges
    made = edge_batch(graphs, encoding, P, ids, nodes + 3, edges + 5, 4)
    sparse = jax.tree.map(np.asarray, made)
    buckets = make_buckets(graphs, encoding, positions=P, num_buckets=1)
    assert sparse.labels.tolist() == [*graphs.labels[ids], -1]
    assert sparse.present.sum() == nodes and (sparse.graph[nodes:] == 4).all()
    assert (np.diff(sparse.receivers) >= 0).all() and (np.diff(sparse.graph) >= 0).all()
    assert (sparse.senders[edges:] == nodes + 2).all()
    assert not sparse.edge_features[edges:].any()
    for i, g in enumerate(ids):
        dense = jax.tree.map(
            lambda a: np.asarray(a)[0], take(buckets.buckets[0], ids[i : i + 1])
        )
        here = np.flatnonzero(sparse.graph == i)
        np.testing.assert_array_equal(
            sparse.features[here], dense.features[: len(here)]
        )
        np.testing.assert_array_equal(
            sparse.positions[here], dense.positions[: len(here)]
        )
        mine = sparse.graph[sparse.receivers] == i
        r, s = (a[mine] - here[0] for a in (sparse.receivers, sparse.senders))
        assert sorted(zip(r, s)) == list(zip(*np.nonzero(dense.adjacency)))
        np.testing.assert_array_equal(
            sparse.edge_features[mine], dense.edge_features[r, s]
        )
        assert graphs.labels[g] == dense.labels
    with pytest.raises(ValueError, match="need at least"):
        edge_batch(graphs, encoding, P, ids, nodes)


@pytest.mark.parametrize("layout", ["dense", "edges"])
def test_flipped_signs_are_one_for_each_graph_and_column(layout):
    rings = load_graphs("rings")[:40]
    P = laplacian_positions(rings, 4)
    supply = in_layout(layout, rings, learn_encoding(rings, [0]), P, 40, num_buckets=1)
    batch = next(supply.batches(np.arange(40)))
    flipped = flip_signs(batch, jax.random.key(3))
    same = zip(batch._fields, batch, flipped)
    assert all(a is b for key, a, b in same if key != "positions")
    before, after = (np.asarray(b.positions, float) for b in (batch, flipped))
    products = before * after
    if layout == "edges":
        rows = [products[np.asarray(batch.graph) == i] for i in range(40)]
    else:
        rows = list(products)
    signs = np.array([np.sign(row.sum(0)) for row in rows])
    np.testing.assert_array_equal(np.abs(before), np.abs(after))
    assert all((row * sign >= 0).all() for row, sign in zip(rows, signs))
    assert set(np.unique(signs)) == {-1, 1} and 0.3 < (signs == 1).mean() < 0.7
