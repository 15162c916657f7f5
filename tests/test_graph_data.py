"""Graphs in, one container out: the promises of nbs/80_graph_readers.ipynb, on arrays, on
files of every format and, where there are any, on real data.
"""

import hashlib
import re
import struct
import sys
import tracemalloc
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from et_nbdev.graph.data import (
    _DATASETS,
    Graph,
    _from_dgl_file,
    _from_mat,
    _from_npz,
    _read_mat,
    _subgraph,
    from_dgl,
    from_pyg,
    from_relations,
    from_scipy,
    load_graph,
    save_graph,
    split,
)
from et_nbdev.graph.sets import _read_tu

rng = np.random.default_rng(0)
FIELDS = ("senders", "receivers", "features", "labels")


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """No data but the test's own; DGL's own folder is the test's, too. A test of real
    data asks for `et_data`, which keeps the folder.
    """
    monkeypatch.delenv("ET_DATA", raising=False)
    monkeypatch.setenv("DGL_DOWNLOAD_DIR", str(tmp_path / "dgl"))


@pytest.fixture
def dgl(monkeypatch):
    monkeypatch.setenv("DGLBACKEND", "pytorch")
    return pytest.importorskip(
        "dgl", reason="DGL is not installed: make test DGL=1, Python 3.11"
    )


def assert_same(a, b, name=True):
    for key in FIELDS:
        x, y = getattr(a, key), getattr(b, key)
        assert x.dtype == y.dtype and np.array_equal(x, y), key
    assert list(a.relations) == list(b.relations)
    for kind in a.relations:
        assert all(map(np.array_equal, a.relations[kind], b.relations[kind])), kind
    assert not name or a.name == b.name


def make(
    senders=(0, 1, 1),
    receivers=(1, 2, 1),
    features=np.eye(3),
    labels=(0, 1, -1),
    **more,
):
    return Graph(senders, receivers, features, labels, **more)


def pairs(edges):
    return list(zip(*(ends.tolist() for ends in edges)))


def edge_lists(max_nodes=6, max_edges=14):
    nodes = st.integers(1, max_nodes)
    return nodes.flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(
                st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)),
                max_size=max_edges,
            ),
        )
    )


def of(n, edges, **more):
    edges = np.array(edges, np.int64).reshape(-1, 2)
    return Graph(
        edges[:, 0],
        edges[:, 1],
        np.arange(2.0 * n).reshape(n, 2),
        np.arange(n) % 3 - 1,
        **more,
    )


# ------------------------------------------------------------------------------------
# the container


def test_graph_keeps_what_it_is_given_in_its_own_types():
    g = make(name="small")
    assert [getattr(g, key).dtype for key in FIELDS] == [
        np.int32,
        np.int32,
        np.float32,
        np.int8,
    ]
    assert pairs(g.edges) == [(0, 1), (1, 2), (1, 1)]
    assert (g.num_nodes, g.num_edges, g.num_features) == (3, 3, 3)
    assert g.degrees.tolist() == [0, 2, 1] and g.labeled.tolist() == [0, 1]
    assert (
        repr(g)
        == "Graph('small'): 3 nodes, 3 edges, 3 features, 50.0% anomalous of 2 labeled"
    )
    assert make(labels=(True, False, False)).labels.tolist() == [1, 0, 0]
    assert "no labels" in repr(make(labels=(-1, -1, -1))) and repr(
        make(labels=(1, 1, 0))
    ).endswith("66.7% anomalous")


def test_graph_is_read_only_and_leaves_its_arguments_alone():
    x = np.eye(3, dtype=np.float32)
    g = make(features=x)
    for key in FIELDS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(g, key)[0] = 0
    x[0, 0] = 2  # the caller's array stays writeable
    with pytest.raises(AttributeError):
        g.labels = np.zeros(3)


@pytest.mark.parametrize(
    "bad, match",
    [
        (
            dict(senders=(0, 3, 1)),
            r"^senders: node ids must lie from 0 to 2.*got 3 at position 1",
        ),
        (
            dict(receivers=(0, 1, -1)),
            r"^receivers: node ids must lie from 0 to 2.*got -1 at position 2",
        ),
        # which is 0 in int32
        (dict(receivers=(0, 1, 2**32)), r"^receivers: .*got 4294967296 at position 2"),
        (
            dict(senders=(0.0, 1.0, 1.0)),
            r"^senders: must hold integers of shape \(E,\), got float64",
        ),
        (dict(senders=[[0, 1, 1]]), r"^senders: .*of shape \(1, 3\)"),
        (dict(senders=[True, False, True]), "^senders: must hold integers.*bool"),
        (dict(senders=[0, [1]]), "^senders: cannot be read as an array"),
        (dict(senders=(0, 1)), r"^senders and receivers: .*\[2, 3\]"),
        (
            dict(features=np.ones(3)),
            (
                r"^features: must hold numbers of shape \(N, F\), got float64 of shape"
                r" \(3,\)"
            ),
        ),
        (dict(features=np.eye(3) * 1j), "^features: .*complex128"),
        (dict(features=[["a"], ["b"], ["c"]]), "^features: must hold numbers"),
        (dict(features=np.zeros((3, 0))), "^features: must have at least one column"),
        (
            dict(features=[[0.0, 1], [np.nan, 0], [0, 0]]),
            "^features: must be finite in float32, got nan at node 1, feature 0",
        ),
        (
            dict(features=[[0.0, 1], [0, 0], [0, -np.inf]]),
            "^features: .*got -inf at node 2, feature 1",
        ),
        (
            dict(features=[[1e300], [0], [0]]),
            r"^features: must be finite in float32, got 1e\+300 at node 0",
        ),
        (
            dict(senders=[], receivers=[], features=np.zeros((0, 2)), labels=[]),
            "^features: the graph is empty",
        ),
        (
            dict(labels=(0, 1)),
            (
                r"^labels: must hold one integer for each of the 3 nodes, got int64 of"
                r" shape \(2,\)"
            ),
        ),
        (dict(labels=(0.0, 1.0, 1.0)), "^labels: .*float64"),
        (
            dict(labels=(0, 2, 0)),
            (
                "^labels: must be 1 .anomalous., 0 .normal. or -1 .unlabeled., got 2"
                " at node 1"
            ),
        ),
        (dict(labels=(0, 256, 0)), "^labels: .*got 256"),  # which is 0 in int8
        (dict(labels=(-2, 1, 0)), "^labels: .*got -2 at node 0"),
        (
            dict(relations={"a": ((0,), (1,))}),
            "^relations: their union must be the edge list",
        ),
        (
            dict(relations={"a": ((0, 1, 1), (1, 2, 3))}),
            r"^relations\['a'\]\[1\]: node ids",
        ),
        (
            dict(relations={"a": ((0, 1, 1), (1, 2))}),
            r"^relations\['a'\]\[0\] and relations\['a'\]\[1\]: an edge has a sender",
        ),
        (
            dict(relations={"a": ((0, 1, 1),)}),
            r"^relations\['a'\]\[0\] and relations\['a'\]\[1\]: an edge has a sender",
        ),
    ],
)
def test_graph_refuses_by_name(bad, match):
    with pytest.raises(ValueError, match=match):
        make(**bad)


def test_a_graph_without_edges_is_a_graph():
    g = make([], [])
    assert (
        g.num_edges == 0
        and g.is_symmetric
        and not g.has_parallel_edges
        and not g.has_self_loops
    )
    assert g.symmetric().simple().degrees.tolist() == [0, 0, 0]


@given(edge_lists(), st.booleans())
def test_merging_and_mirroring_are_set_operations(case, loops):
    n, edges = case
    g = of(n, edges)
    unique = set(edges)
    assert g.degrees.tolist() == [sum(r == v for _, r in edges) for v in range(n)]
    assert g.has_parallel_edges == (
        len(unique) < len(edges)
    ) and g.has_self_loops == any(s == r for s, r in edges)
    assert g.is_symmetric == (unique == {(r, s) for s, r in unique})
    order = lambda found: sorted(found, key=lambda e: (e[1], e[0]))
    assert pairs(g.simple(self_loops=loops).edges) == order(
        e for e in unique if loops or e[0] != e[1]
    )
    mirrored = g.symmetric()
    assert (
        pairs(mirrored.edges) == order(unique | {(r, s) for s, r in unique})
        and mirrored.is_symmetric
    )
    assert_same(mirrored.symmetric(), mirrored)
    assert mirrored.senders.dtype == np.int32


def test_three_hundred_parallel_edges_are_one():
    "A counter of eight bits would come round to a few."
    g = of(2, [(0, 1)] * 256 + [(1, 0)] * 300)
    assert pairs(g.simple().edges) == [(1, 0), (0, 1)]


@given(edge_lists(), st.data())
def test_relations_keep_their_edges_and_their_union_is_the_edge_list(case, data):
    n, edges = case
    kinds = [data.draw(st.sampled_from("abc")) for _ in edges]
    relations = {
        k: tuple(
            np.array([e for e, own in zip(edges, kinds) if own == k], np.int64)
            .reshape(-1, 2)
            .T
        )
        for k in "abc"
    }
    g = from_relations(relations, np.ones((n, 1)), np.zeros(n, int), "many")
    assert set(pairs(g.edges)) == set(edges) and not g.has_parallel_edges
    assert {k: pairs(e) for k, e in g.relations.items()} == {
        k: pairs(e) for k, e in relations.items()
    }
    both = g.symmetric().simple()
    for k in "abc":
        assert_same(both.relation(k), g.relation(k).symmetric().simple())
    assert (
        "of 3 kinds" in repr(g)
        and g.relation("a").name == "many/a"
        and not g.relation("a").relations
    )


def test_relations_are_refused_by_name():
    with pytest.raises(ValueError, match="relations: at least one"):
        from_relations({}, np.eye(3), [0, 1, 0])
    with pytest.raises(
        ValueError, match=r"relations\['b'\]\[0\]: node ids must lie from 0 to 2"
    ):
        from_relations({"a": ([0], [1]), "b": ([3], [1])}, np.eye(3), [0, 1, 0])
    with pytest.raises(
        ValueError,
        match=r"relations\['b'\].*: an edge has a sender and a receiver.*\[1, 2\]",
    ):
        from_relations({"a": ([0], [1]), "b": ([2], [1, 0])}, np.eye(3), [0, 1, 0])
    with pytest.raises(ValueError, match=r"kind: .*\['a'\], got 'b'"):
        from_relations({"a": ([0], [1])}, np.eye(3), [0, 1, 0]).relation("b")


@given(edge_lists(), st.data())
def test_subgraph_holds_the_nodes_in_order_and_the_edges_among_them(case, data):
    n, edges = case
    nodes = data.draw(st.lists(st.integers(0, n - 1), min_size=1, unique=True))
    g = of(n, edges)
    g = from_relations({"a": g.edges, "b": g.edges[::-1]}, g.features, g.labels)
    part = _subgraph(g, nodes)
    np.testing.assert_array_equal(part.features, g.features[nodes])
    np.testing.assert_array_equal(part.labels, g.labels[nodes])
    for mine, whole in (
        (part.edges, g.edges),
        *((part.relations[k], g.relations[k]) for k in "ab"),
    ):
        assert [(nodes[s], nodes[r]) for s, r in pairs(mine)] == [
            (s, r) for s, r in pairs(whole) if s in nodes and r in nodes
        ]
    mask = np.isin(np.arange(n), nodes)
    assert_same(_subgraph(g, mask), _subgraph(g, sorted(nodes)))


@pytest.mark.parametrize(
    "nodes, match",
    [
        ([0, 0], "nodes: an id is given twice"),
        ([], "nodes: at least one"),
        ([3], "nodes: node ids must lie"),
        ([0.5], "nodes: must hold integers"),
        ([True], r"nodes: booleans must have shape \(3,\)"),
        ([False] * 3, "nodes: at least one"),
    ],
)
def test_subgraph_refuses_by_name(nodes, match):
    with pytest.raises(ValueError, match=match):
        _subgraph(make(), nodes)


# ------------------------------------------------------------------------------------
# other libraries


def test_from_scipy_reads_i_j_as_an_edge_from_i_to_j():
    dense = np.array([[0, 2.5, 0], [0, 0, -1], [0, 0, 0]])
    # a zero that is stored is no edge
    explicit = sp.coo_array(([2.5, -1.0, 0.0], ([0, 1, 2], [1, 2, 0])))
    for A in (
        sp.coo_matrix(dense),
        sp.csc_array(dense),
        explicit.tocsr(),
        sp.lil_array(dense),
    ):
        g = from_scipy(A, np.eye(3), [0, 1, 0], "s")
        assert pairs(g.edges) == [(0, 1), (1, 2)] and g.name == "s"
    both = from_scipy({"a": A, "b": A.T}, sp.csc_matrix(np.eye(3)), [0, 1, 0])
    assert pairs(both.relations["b"]) == [(1, 0), (2, 1)] and both.num_edges == 4
    np.testing.assert_array_equal(both.features, np.eye(3))
    for bad in (dense, sp.csr_array((2, 3)), [[0, 1], [1, 0]], None):
        with pytest.raises(ValueError, match="adjacency: must be a sparse"):
            from_scipy(bad, np.eye(3), [0, 1, 0])


def test_sparse_indices_out_of_range_are_refused_before_they_are_used():
    bad = sp.csc_array(np.eye(3))
    bad.indices[1] = 10**6
    for args in ((sp.csr_array((3, 3)), bad), (bad, np.eye(3))):
        with pytest.raises(ValueError):
            from_scipy(*args, [0, 1, 0])


@pytest.mark.parametrize(
    "labels",
    [
        [0, 1, 0],
        [[0], [1], [0]],
        [[0, 1, 0]],
        [0.0, 1.0, 0.0],
        [[1, 0], [0, 1], [1, 0]],
        [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]],
        [False, True, False],
    ],
)
def test_labels_of_every_published_shape(labels):
    assert from_scipy(sp.eye_array(3), np.eye(3), np.array(labels)).labels.tolist() == [
        0,
        1,
        0,
    ]


@pytest.mark.parametrize(
    "labels",
    [[0.5, 1, 0], [[1, 1], [0, 1], [1, 0]], [[1, 0, 0]] * 3, [0, 1], [np.nan, 0, 1]],
)
def test_labels_without_a_single_meaning_are_refused(labels):
    with pytest.raises(ValueError, match="^labels: "):
        from_scipy(sp.eye_array(3), np.eye(3), np.array(labels))


def test_from_pyg_needs_no_pyg():
    data = SimpleNamespace(
        x=np.eye(3), edge_index=np.array([[0, 1], [1, 2]]), y=np.array([0, 1, 0])
    )
    assert pairs(from_pyg(data).edges) == [(0, 1), (1, 2)]
    for key in ("x", "edge_index", "y"):
        with pytest.raises(ValueError, match=f"^data: .*without {key}$"):
            from_pyg(SimpleNamespace(**{**vars(data), key: None}))
    for shape in ((3, 2), (2,)):
        with pytest.raises(
            ValueError, match=r"^data.edge_index: must have shape \(2, E\)"
        ):
            from_pyg(
                SimpleNamespace(**{**vars(data), "edge_index": np.zeros(shape, int)})
            )


def test_tensors_are_read_on_the_host_without_their_gradient():
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: make test DGL=1, Python 3.11"
    )
    x = torch.eye(3, requires_grad=True)
    g = from_pyg(
        SimpleNamespace(
            x=x, edge_index=torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([0, 1, 0])
        )
    )
    assert_same(g, make((0, 1), (1, 2), labels=(0, 1, 0)))


def dgl_graph(dgl, n=40, e=150, onehot=False, seed=0):
    import torch

    torch.manual_seed(seed)
    g = dgl.graph((torch.randint(0, n, (e,)), torch.randint(0, n, (e,))), num_nodes=n)
    g.ndata["feature"] = torch.randn(n, 10, dtype=torch.float64)
    y = torch.arange(n) % 2
    g.ndata["label"] = torch.nn.functional.one_hot(y) if onehot else y
    return g


def test_from_dgl_homogeneous(dgl):
    g = dgl_graph(dgl)
    mine = from_dgl(g, "d")
    assert (
        pairs(mine.edges) == list(zip(*(t.tolist() for t in g.edges())))
        and mine.name == "d"
    )
    np.testing.assert_array_equal(
        mine.features, g.ndata["feature"].numpy().astype(np.float32)
    )
    assert mine.labels.tolist() == g.ndata["label"].tolist()
    assert_same(from_dgl(dgl_graph(dgl, onehot=True), "d"), mine)
    g.ndata["feat"] = g.ndata.pop("feature")
    assert_same(from_dgl(g, "d"), mine)
    del g.ndata["label"]
    with pytest.raises(
        ValueError, match=r"graph: must have node data .*'label', got \['feat'\]"
    ):
        from_dgl(g)


def test_from_dgl_heterogeneous(dgl):
    import torch

    g = dgl.heterograph(
        {
            ("u", "b", "u"): (torch.tensor([0, 1]), torch.tensor([1, 2])),
            ("u", "a", "u"): (torch.tensor([2, 0]), torch.tensor([1, 1])),
        }
    )
    g.ndata["feature"], g.ndata["label"] = torch.eye(3), torch.tensor([0, 1, 0])
    assert_same(
        from_dgl(g),
        from_relations(
            {"a": ([2, 0], [1, 1]), "b": ([0, 1], [1, 2])}, np.eye(3), [0, 1, 0]
        ),
    )
    two = dgl.heterograph({("u", "buys", "v"): (torch.tensor([0]), torch.tensor([0]))})
    with pytest.raises(ValueError, match="graph: must have one type of nodes"):
        from_dgl(two)


# ------------------------------------------------------------------------------------
# files


def hetero():
    edges = rng.integers(0, 30, (2, 2, 80))
    return from_relations(
        {"a": edges[0], "b c": edges[1]},
        rng.normal(size=(30, 4)),
        np.arange(30) % 3 - 1,
        "kept name",
    )


def test_npz_keeps_everything(tmp_path):
    g = hetero()
    save_graph(g, tmp_path / "new folder" / "x.npz")
    assert_same(_from_npz(tmp_path / "new folder" / "x.npz"), g)
    assert [p.name for p in (tmp_path / "new folder").iterdir()] == ["x.npz"]
    np.savez_compressed(
        tmp_path / "plain.npz", **{key: getattr(g, key) for key in FIELDS}
    )
    assert _from_npz(tmp_path / "plain.npz").name == "plain"


def test_npz_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    old = make(name="old")
    save_graph(old, tmp_path / "x.npz")

    def full(file, **arrays):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="x.npz"):
        save_graph(hetero(), tmp_path / "x.npz")
    assert_same(_from_npz(tmp_path / "x.npz"), old)
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]


def heterophilous(path, n=60, e=200):
    "As Platonov et al. publish them: each undirected edge once, masks of ten splits."
    edges = np.unique(np.sort(rng.integers(0, n, (e, 2)), axis=1), axis=0)
    edges = edges[edges[:, 0] != edges[:, 1]]
    arrays = dict(
        node_features=rng.random((n, 10)),
        node_labels=np.arange(n) % 4 // 3,
        edges=edges,
    )
    np.savez(path, train_masks=np.zeros((10, n), bool), **arrays)
    return arrays


def test_an_npz_may_have_no_labels(tmp_path):
    arrays = {key: getattr(make(), key) for key in FIELDS if key != "labels"}
    np.savez(tmp_path / "x.npz", **arrays)
    graph = _from_npz(tmp_path / "x.npz")
    assert (graph.labels == -1).all() and len(graph.labels) == make().num_nodes


def test_npz_of_the_heterophilous_layout(tmp_path):
    raw = heterophilous(tmp_path / "tolokers.npz")
    assert pairs(_from_npz(tmp_path / "tolokers.npz").edges) == list(
        map(tuple, raw["edges"].tolist())
    )
    g = load_graph("tolokers", tmp_path)
    assert set(pairs(g.edges)) == {tuple(e) for e in raw["edges"].tolist()} | {
        tuple(e[::-1]) for e in raw["edges"].tolist()
    }
    assert g.name == "tolokers" and g.labels.tolist() == raw["node_labels"].tolist()


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda a: a.pop("receivers"), r"x.npz holds .* but lacks receivers"),
        (
            lambda a: [a.pop("senders"), a.pop("features")],
            "x.npz holds .* but lacks senders, features",
        ),
        (
            lambda a: a.update(senders=np.array([0, 1, 7])),
            "x.npz holds no sound graph: senders: node ids must lie",
        ),
        (
            lambda a: a.update({"relations/a/senders": np.array([0])}),
            "x.npz holds no sound graph",
        ),
        (
            lambda a: a.update(features=np.array([{}, {}, {}])),
            "x.npz is damaged, incomplete or of another format.*pickle",
        ),
    ],
)
def test_npz_of_other_contents_is_refused(tmp_path, change, match):
    arrays = {key: getattr(make(), key) for key in FIELDS}
    change(arrays)
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=match):
        _from_npz(tmp_path / "x.npz")


@pytest.mark.parametrize("read", [_from_npz, _from_mat, _from_dgl_file])
def test_files_that_are_not_there_or_no_files(tmp_path, read):
    with pytest.raises(FileNotFoundError, match="missing"):
        read(tmp_path / "missing")
    with pytest.raises(OSError):
        read(tmp_path)


def sound_or_refused(read, path, whole):
    """What a damaged file may lead to: the graph that was saved, or a ValueError with
    the file's name.
    """
    try:
        g = read(path)
    except ValueError as e:
        assert path.name in str(e)
        return False
    assert_same(g, whole)
    return True


@settings(max_examples=40)
@given(st.data())
def test_a_damaged_npz_is_refused_or_unharmed(tmp_path, data):
    path, g = tmp_path / "x.npz", make(name="fuzz")
    save_graph(g, path)
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
        assert not sound_or_refused(_from_npz, path, g), "a part passed for the whole"
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(
            st.integers(0, 7)
        )
        path.write_bytes(raw)
        sound_or_refused(_from_npz, path, g)


def test_no_damaged_bit_of_the_directory_loses_an_array(tmp_path):
    "Optional ones, the labels among them, would be missing without an error."
    path, g = tmp_path / "x.npz", make(name="fuzz")
    save_graph(g, path)
    raw = path.read_bytes()
    for i in range(raw.index(b"PK\x01\x02"), len(raw)):
        for bit in range(8):
            path.write_bytes(raw[:i] + bytes([raw[i] ^ 1 << bit]) + raw[i + 1 :])
            sound_or_refused(_from_npz, path, g)


def test_every_damaged_bit_of_an_array_is_noticed(tmp_path):
    path, g = tmp_path / "x.npz", make(features=rng.normal(size=(3, 9)))
    save_graph(g, path)
    raw = path.read_bytes()
    start = raw.index(g.features.tobytes())
    # the last bytes of the array's header, and its data
    for i in range(start - 100, start + g.features.nbytes, 7):
        path.write_bytes(raw[:i] + bytes([raw[i] ^ 4]) + raw[i + 1 :])
        with pytest.raises(ValueError, match="x.npz is damaged"):
            _from_npz(path)


def test_an_array_read_only_in_part_is_noticed(tmp_path):
    """By this header it is a smaller array, whose end, and with it the checksum,
    numpy.load would never reach.
    """
    path = tmp_path / "x.npz"
    save_graph(make(features=rng.normal(size=(3, 9000))), path)
    path.write_bytes(path.read_bytes().replace(b"(3, 9000)", b"(3, 1000)"))
    assert np.load(path)["features"].shape == (3, 1000)
    with pytest.raises(ValueError, match="x.npz is damaged.*CRC"):
        _from_npz(path)


# ------------------------------------------------------------------------------------
# YelpChi and Amazon

NETS = {
    "Amazon.mat": ("net_upu", "net_usu", "net_uvu"),
    "YelpChi.mat": ("net_rsr", "net_rtr", "net_rur"),
}


def write_mat(path, n=3400, **options):
    """The layout of the published files: sparse doubles, label (1, N), the union beside
    the relations.
    """
    noise = np.random.default_rng(1)
    nets = {}
    for d, net in enumerate(NETS[path.name], 1):
        s, r = noise.integers(0, n - d, (2, 2 * n))
        # DGL counts the nodes by the highest id
        s, r = np.append(s[s != r], n - 1), np.append(r[s != r], 0)
        A = sp.coo_matrix((np.ones(s.size), (s, r)), shape=(n, n)).tocsc()
        nets[net] = ((A + A.T) > 0).astype(float).tocsc()
    homo = (sum(nets.values()) > 0).astype(float).tocsc()
    x = sp.csc_matrix(
        np.where(noise.random((n, 25)) < 0.5, 0, noise.normal(size=(n, 25)) * 100)
    )
    label = (np.arange(n) % 7 == 6).astype(float)[None]
    path.parent.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(
        path,
        {"homo": homo, **nets, "features": x, "label": label},
        **{"do_compression": True, **options},
    )
    return {"homo": homo, **nets}, x.toarray(), label[0]


@pytest.mark.parametrize(
    "name, file", [("amazon", "Amazon.mat"), ("yelp", "YelpChi.mat")]
)
def test_mat_files_as_they_are_published(tmp_path, name, file):
    nets, x, label = write_mat(tmp_path / "graphs" / "anomaly" / file)
    g = load_graph(name, tmp_path)
    dense = lambda edges: sp.coo_array(
        (np.ones(len(edges[0])), edges), shape=(len(x),) * 2
    ).toarray()
    np.testing.assert_array_equal(dense(g.edges), nets["homo"].toarray())
    assert list(g.relations) == list(NETS[file])
    for net in NETS[file]:
        np.testing.assert_array_equal(dense(g.relations[net]), nets[net].toarray())
        assert g.relation(net).is_symmetric
    np.testing.assert_array_equal(g.features, x.astype(np.float32))
    unlabeled = 3305 if name == "amazon" else 0
    assert (
        (g.labels[:unlabeled] == -1).all()
        and (g.labels[unlabeled:] == label[unlabeled:]).all()
        and g.name == name
    )


def test_amazon_upu_is_one_relation_without_its_isolated_nodes(tmp_path):
    nets, x, label = write_mat(tmp_path / "Amazon.mat")
    g = load_graph("amazon-upu", tmp_path)
    kept = np.flatnonzero(np.asarray(nets["net_upu"].sum(0)))
    assert 0 < len(kept) < 3400, "the case needs isolated nodes"
    np.testing.assert_array_equal(g.features, x[kept].astype(np.float32))
    np.testing.assert_array_equal(g.labels, np.where(kept < 3305, -1, label[kept]))
    dense = np.zeros((len(kept),) * 2)
    dense[g.edges] = 1
    np.testing.assert_array_equal(dense, nets["net_upu"].toarray()[np.ix_(kept, kept)])
    assert g.name == "amazon-upu" and not g.relations


def test_amazon_upu_npz_takes_precedence_and_its_first_rows_are_unlabeled(tmp_path):
    n = 2400
    raw = Graph(np.arange(n - 1), np.arange(1, n), np.ones((n, 2)), np.arange(n) % 2)
    write_mat(tmp_path / "Amazon.mat")
    save_graph(raw, tmp_path / "amazon_upu.npz")
    g = load_graph("amazon-upu", tmp_path)
    assert (
        (g.labels[:2288] == -1).all()
        and (g.labels[2288:] == raw.labels[2288:]).all()
        and g.num_edges == 2 * (n - 1)
    )


def test_dgl_and_scipy_make_the_same_graph_of_one_mat_file(tmp_path, dgl):
    from dgl.data.utils import _get_dgl_url

    suffix = hashlib.sha1(_get_dgl_url("dataset/FraudAmazon.zip").encode()).hexdigest()[
        :8
    ]
    # where DGL puts what it downloads
    write_mat(tmp_path / f"amazon_{suffix}" / "Amazon.mat")
    by_dgl = load_graph("amazon", tmp_path)
    assert list(tmp_path.glob("amazon_*/amazon_dgl_graph_*.bin")), (
        "it was not DGL that read it"
    )
    assert_same(by_dgl, load_graph("amazon", tmp_path / f"amazon_{suffix}"))


def test_a_damaged_mat_is_refused(tmp_path):
    write_mat(tmp_path / "Amazon.mat", n=300)
    raw = (tmp_path / "Amazon.mat").read_bytes()
    for length in (
        0,
        50,
        128,
        200,
        len(raw) // 3,
        len(raw) // 2,
        len(raw) - 100,
        len(raw) - 1,
    ):
        (tmp_path / "Amazon.mat").write_bytes(raw[:length])
        with pytest.raises(
            ValueError, match=r"Amazon.mat (is damaged, incomplete|holds .* but lacks)"
        ):
            load_graph("amazon", tmp_path)
    (tmp_path / "Amazon.mat").write_bytes(raw)
    load_graph("amazon", tmp_path)


@settings(max_examples=25)
@given(st.data())
def test_a_mat_that_broke_off_or_has_a_wrong_bit_is_refused_or_unharmed(tmp_path, data):
    path, compressed = tmp_path / "YelpChi.mat", data.draw(st.booleans())
    write_mat(path, n=20, do_compression=compressed)
    raw, whole = bytearray(path.read_bytes()), _from_mat(path)
    # without compression the format has no checksum
    if compressed and data.draw(st.booleans()):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(
            st.integers(0, 7)
        )
    else:
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    path.write_bytes(raw)
    sound_or_refused(_from_mat, path, whole)


@pytest.mark.parametrize("compressed", [False, True])
def test_every_kind_of_matrix_is_read_as_scipy_reads_it(tmp_path, compressed):
    noise = np.random.default_rng(0)
    s = sp.random(30, 20, 0.2, format="csc", random_state=0)
    kinds = {
        f"of_{t}": noise.integers(0, 100, (3, 4)).astype(t)
        for t in "i1 u1 i2 u2 i4 u4 i8 u8 f4 f8 ?".split()
    }
    kinds |= {
        "sparse": s,
        "logical": s.astype(bool),
        "no_entries": sp.csc_array((5, 7)),
        "empty": np.zeros((0, 3)),
        "cube": noise.normal(size=(2, 3, 4)),
        "long": np.arange(70_000.0),
    }
    others = {
        "text": "abc",
        "cell": np.array([1, "a"], object),
        "struct": {"q": 1.0},
        "complex": np.array([[1j]]),
    }
    scipy.io.savemat(tmp_path / "x.mat", kinds | others, do_compression=compressed)
    ours, theirs = _read_mat(tmp_path / "x.mat"), scipy.io.loadmat(tmp_path / "x.mat")
    assert set(ours) == set(kinds) | set(others) and all(
        ours[name] is None for name in others
    )
    for name in kinds:
        a, b = (
            x.toarray() if sp.issparse(x) else x for x in (ours[name], theirs[name])
        )
        assert a.shape == b.shape and (a == b).all(), name


def test_a_mat_of_the_other_byte_order_and_of_other_formats(tmp_path):
    element = lambda kind, data: (
        struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8)
    )
    matrix = element(
        14,
        element(6, struct.pack(">II", 6, 0))
        + element(5, struct.pack(">ii", 1, 3))
        + struct.pack(">HH4s", 1, 1, b"x")
        + element(9, struct.pack(">3d", 1, 2.5, -3)),
    )
    path = tmp_path / "x.mat"
    path.write_bytes(b"MATLAB 5.0".ljust(124) + b"\1\0MI" + matrix)
    assert (
        _read_mat(path)["x"].tolist()
        == [[1, 2.5, -3]]
        == scipy.io.loadmat(path)["x"].tolist()
    )
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(
        ValueError, match="x.mat is damaged.*an element of [0-9]+ bytes at byte 8 of"
    ):
        _from_mat(path)
    for head in (b"\0\2IM", bytes(4), b"\0\1MI"):
        path.write_bytes(bytes(124) + head + matrix)
        with pytest.raises(
            ValueError,
            match=(
                "x.mat is damaged.*no MAT-file of level 5, which MATLAB writes with -v6"
                " or -v7"
            ),
        ):
            _from_mat(path)


MUCH = 16 * 2**20


def bomb(kind, path):
    "16 MiB of zeros in a file of 16 KiB."
    if kind in ("npz", "lie"):
        with open(path, "wb") as f:
            np.savez_compressed(
                f,
                **{key: getattr(make(), key) for key in FIELDS}
                | {"features": np.zeros((4, MUCH // 16), np.float32)},
            )
    if kind == "mat":
        scipy.io.savemat(
            path,
            {
                "features": np.zeros((4, MUCH // 32)),
                "label": [[0, 1, 0, 1]],
                "net_a": sp.csc_array(np.eye(4)),
            },
            do_compression=True,
            appendmat=False,
        )
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
            z.writestr("SET_A.txt", bytes(MUCH))
    if kind == "lie":  # about the size that is to come
        content, at = bytearray(path.read_bytes()), 0
        while (at := content.find(b"PK\1\2", at + 1)) > 0:
            content[at + 24 : at + 28] = struct.pack("<I", 200)
        path.write_bytes(content)


@pytest.mark.parametrize(
    "kind, read",
    [("npz", _from_npz), ("lie", _from_npz), ("mat", _from_mat), ("zip", _read_tu)],
)
def test_a_small_file_that_unpacks_to_a_large_one_is_refused_before_it_does(
    tmp_path, monkeypatch, kind, read
):
    monkeypatch.setattr("et_nbdev.graph.data._ROOM", 0)
    bomb(kind, path := tmp_path / f"x.{kind}")
    tracemalloc.start()
    try:
        with pytest.raises(
            ValueError,
            match=f"x.{kind} is damaged.*{'CRC' if kind == 'lie' else 'bytes'}",
        ):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < MUCH / 2
    finally:
        tracemalloc.stop()


def test_what_is_not_of_the_graph_is_left_packed(tmp_path, monkeypatch):
    monkeypatch.setattr("et_nbdev.graph.data._ROOM", 0)
    arrays = {key: getattr(make(), key) for key in FIELDS} | {
        "relations/a/senders": make().senders,
        "relations/a/receivers": make().receivers,
    }
    np.savez_compressed(tmp_path / "x.npz", more=np.zeros(MUCH, np.uint8), **arrays)
    assert list(_from_npz(tmp_path / "x.npz").relations) == ["a"]


def test_sparse_features_too_large_to_be_written_out_are_refused(tmp_path):
    features = sp.csc_array(([1.0], ([0], [0])), shape=(20_000, 20_000))
    scipy.io.savemat(
        tmp_path / "x.mat",
        {
            "features": features,
            "label": np.zeros((1, 20_000)),
            "net_a": sp.csc_array((20_000, 20_000)),
        },
        do_compression=True,
    )
    with pytest.raises(
        ValueError, match="x.mat holds no sound graph: features: .*20000 × 20000"
    ):
        _from_mat(tmp_path / "x.mat")


def test_indices_that_would_write_anywhere_are_refused():
    """The last pointer says that there are no entries, which SciPy takes for a reason
    not to look at the others.
    """
    for kind in (sp.csc_array, sp.csr_array):
        A = kind((3, 3))
        A.indptr[:] = [0, 10**6, 2, 0]
        with pytest.raises(ValueError, match="non-decreasing"):
            from_scipy(A, np.ones((3, 1)), [0, 1, 0])


def test_a_mat_of_other_contents_is_refused(tmp_path):
    nets = {"net_upu": sp.csc_array(np.eye(3))}
    for contents, match in (
        ({"features": np.eye(3), **nets}, "lacks label"),
        ({"features": np.eye(3), "label": [[0, 1, 0]]}, "lacks net_…"),
        (
            {"features": np.eye(3), "label": [[0, 1]], **nets},
            "holds no sound graph: labels: ",
        ),
        (
            {"features": np.eye(3), "label": [[0, 1, 0]], "net_upu": np.eye(3)},
            "holds no sound graph: adjacency: ",
        ),
    ):
        scipy.io.savemat(tmp_path / "x.mat", contents)
        with pytest.raises(ValueError, match=f"x.mat .*{match}"):
            _from_mat(tmp_path / "x.mat")


# ------------------------------------------------------------------------------------
# DGL's binary files


@pytest.mark.parametrize("name, onehot", [("tfinance", True), ("tsocial", False)])
def test_dgl_files_as_they_are_published(tmp_path, dgl, name, onehot):
    g = dgl_graph(dgl, onehot=onehot)
    dgl.save_graphs(str(tmp_path / name), [g])
    found, want = load_graph(name, tmp_path), from_dgl(g, name)
    assert_same(found, want.symmetric().simple())
    assert found.is_symmetric and not found.has_self_loops and want.has_self_loops


@pytest.mark.parametrize("part", [0.3, 0.9, -8])
def test_a_truncated_dgl_file_is_refused_and_ends_nobody_else(tmp_path, dgl, part):
    "At nine tenths DGL itself ends with a segmentation fault."
    dgl.save_graphs(str(tmp_path / "tfinance"), [dgl_graph(dgl, onehot=True)])
    raw = (tmp_path / "tfinance").read_bytes()
    if part < 0:
        part = 1 - 120 / len(raw)
    (tmp_path / "tfinance").write_bytes(raw[: int(part * len(raw))])
    with pytest.raises(
        ValueError,
        match=r"path: .*tfinance could not be read by DGL \(.+\); if it is damaged",
    ):
        load_graph("tfinance", tmp_path)


@pytest.fixture
def false_dgl(tmp_path, monkeypatch):
    "A package of that name which does what it is told, found before any real one."
    package = tmp_path / "path" / "dgl"
    package.mkdir(parents=True)
    (package / "data.py").write_text("")
    for name in [m for m in sys.modules if m.partition(".")[0] == "dgl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(package.parent))
    (tmp_path / "tfinance").write_bytes(b"x" * 100)
    return package / "__init__.py"


def test_a_reader_that_dies_is_told_from_one_that_answers(tmp_path, false_dgl):
    false_dgl.write_text(
        "import os, signal\ndef load_graphs(path): os.kill(os.getpid(),"
        " signal.SIGSEGV)\n"
    )
    with pytest.raises(
        ValueError,
        match=r"tfinance could not be read by DGL \(it ended DGL with signal 11\)",
    ):
        load_graph("tfinance", tmp_path)


def test_a_reader_that_hangs_is_stopped(tmp_path, false_dgl):
    from et_nbdev.graph import data

    false_dgl.write_text("import time\ndef load_graphs(path): time.sleep(600)\n")
    with pytest.raises(RuntimeError, match="no answer within 1 s"):
        data._by_dgl("file", str(tmp_path / "tfinance"), timeout=1)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="no such limit on this system"
)
def test_a_reader_that_asks_for_any_amount_of_memory_is_refused_it(tmp_path, false_dgl):
    false_dgl.write_text("def load_graphs(path): return bytearray(8 << 30)\n")
    with pytest.raises(
        ValueError, match=r"tfinance could not be read by DGL \(MemoryError"
    ):
        load_graph("tfinance", tmp_path)


def test_a_broken_dgl_is_not_blamed_on_the_file(tmp_path, false_dgl):
    false_dgl.write_text("raise ImportError('cannot load library')\n")
    with pytest.raises(
        ImportError,
        match=(
            r"DGL is installed but does not work \(ImportError: cannot load library\)"
        ),
    ):
        load_graph("tfinance", tmp_path)


def test_without_dgl_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "dgl", None)
    (tmp_path / "tsocial").write_bytes(b"x" * 100)
    install = re.escape("pip install 'et_nbdev[dgl]'") + (
        "" if sys.version_info < (3, 12) else " on Python 3.11"
    )
    for name in ("tsocial", "amazon", "yelp", "amazon-upu"):
        with pytest.raises(ImportError, match=install) as e:
            load_graph(name, tmp_path)
        assert _DATASETS[name].file in str(e.value)


def test_a_failed_download_says_where_the_file_is_published(tmp_path, false_dgl):
    (false_dgl.parent / "data.py").write_text(
        "def FraudYelpDataset(raw_dir, verbose): raise OSError('no network')\n"
    )
    false_dgl.write_text("")
    with pytest.raises(
        FileNotFoundError,
        match=(
            r"name: 'yelp' was not found.*OSError: no"
            r" network(.|\n)*YelpChi.mat(.|\n)*CARE-GNN"
        ),
    ):
        load_graph("yelp", tmp_path)


# ------------------------------------------------------------------------------------
# graphs by name


def test_unknown_names_and_folders_are_refused(tmp_path):
    for name in ("cora", str(tmp_path), str(tmp_path / "missing.npz")):
        with pytest.raises(
            ValueError,
            match=(
                "name: must be one of digits-knn, .*yelp.*, or the path of an .npz,"
                f" .mat or DGL file, got '{name}'"
            ),
        ):
            load_graph(name)
    (tmp_path / "edges.csv").write_text("source,target\n")
    with pytest.raises(ValueError, match="edges.csv' is a table; .* from_pandas"):
        load_graph(str(tmp_path / "edges.csv"))
    with pytest.raises(ValueError, match="root: .*nowhere is not a folder"):
        load_graph("tolokers", tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["tfinance", "tsocial", "tolokers"])
def test_a_missing_file_is_named_with_the_places_looked_at(tmp_path, monkeypatch, name):
    with pytest.raises(
        FileNotFoundError, match="Neither root nor the environment variable ET_DATA"
    ):
        load_graph(name)
    monkeypatch.setenv("ET_DATA", str(tmp_path / "data"))
    with pytest.raises(FileNotFoundError) as e:
        load_graph(name, tmp_path)
    file = _DATASETS[name].file
    for place in (
        tmp_path / "graphs" / "anomaly" / file,
        tmp_path / file,
        tmp_path / "data" / "graphs" / "anomaly" / file,
    ):
        assert str(place) in str(e.value)
    assert "https://github.com/" in str(e.value)


def test_a_file_of_ones_own_goes_by_its_path(tmp_path):
    """Both directions of every edge, no loops, and labels as they are; the file's own
    name.
    """
    mine = make(labels=(0, 1, 1), name="mine")
    save_graph(mine, tmp_path / "own.npz")
    g = load_graph(str(tmp_path / "own.npz"))
    assert_same(g, mine.symmetric().simple())
    write_mat(tmp_path / "Amazon.mat", n=40)
    assert (load_graph(str(tmp_path / "Amazon.mat")).labels >= 0).all() and list(
        load_graph(str(tmp_path / "Amazon.mat")).relations
    ) == list(NETS["Amazon.mat"])
    (tmp_path / "own.npz").write_bytes((tmp_path / "own.npz").read_bytes()[:-50])
    with pytest.raises(ValueError, match="own.npz is damaged"):
        load_graph(str(tmp_path / "own.npz"))


def test_a_file_of_ones_own_in_dgls_format(tmp_path, dgl):
    g = dgl_graph(dgl)
    dgl.save_graphs(str(tmp_path / "mine.bin"), [g])
    assert_same(
        load_graph(str(tmp_path / "mine.bin")), from_dgl(g, "mine").symmetric().simple()
    )


def test_root_comes_before_the_environment(tmp_path, monkeypatch):
    for folder in ("root", "env"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("ET_DATA", str(tmp_path / "env"))
    heterophilous(tmp_path / "env" / "tolokers.npz", n=50)
    assert load_graph("tolokers").num_nodes == 50
    heterophilous(tmp_path / "root" / "tolokers.npz", n=70)
    assert load_graph("tolokers", tmp_path / "root").num_nodes == 70


def test_a_file_without_edges_is_refused(tmp_path):
    save_graph(make([0, 1], [0, 1]), tmp_path / "tolokers.npz")
    with pytest.raises(
        ValueError, match="'tolokers' as found has no edges between different nodes"
    ):
        load_graph("tolokers", tmp_path)


def test_the_graph_that_is_always_there():
    from sklearn.datasets import load_digits
    from sklearn.neighbors import NearestNeighbors

    g, digits = load_graph("digits-knn"), load_digits()
    assert (g.num_nodes, g.num_edges, g.num_features) == (
        1797,
        19472,
        32,
    ) and g.labels.sum() == 174
    assert (
        g.is_symmetric
        and not g.has_parallel_edges
        and not g.has_self_loops
        and g.degrees.min() == 8
    )
    np.testing.assert_array_equal(g.labels, digits.target == 8)
    np.testing.assert_array_equal(g.features[5].reshape(8, 4), digits.images[5][:, 4:])
    left = digits.images[:, :, :4].reshape(-1, 32)
    # the node itself left out
    eighth = NearestNeighbors(n_neighbors=8).fit(left).kneighbors()[0][:, -1]
    apart = np.linalg.norm(left[g.senders] - left[g.receivers], axis=1)
    assert (apart <= np.maximum(eighth[g.senders], eighth[g.receivers]) + 1e-9).all(), (
        "an edge to somebody who is not near"
    )
    digest = hashlib.sha256(np.stack(g.edges).astype("<i4").tobytes()).hexdigest()
    assert digest.startswith("b8d9ed221505c921"), "another graph than everywhere else"


def test_its_sibling_with_two_kinds_of_edges():
    from sklearn.datasets import load_digits

    g, images = load_graph("digits-relations"), load_digits().images
    assert (
        list(g.relations) == ["upper", "lower"]
        and g.name == "digits-relations"
        and g.is_symmetric
        and not g.has_self_loops
    )
    assert set(pairs(g.edges)) == set(pairs(g.relations["upper"])) | set(
        pairs(g.relations["lower"])
    )
    for kind, rows in (("upper", slice(0, 4)), ("lower", slice(4, 8))):
        quarter = images[:, rows, :4].reshape(-1, 16)
        one = g.relation(kind)
        apart = np.linalg.norm(quarter[one.senders] - quarter[one.receivers], axis=1)
        strangers = np.linalg.norm(quarter - np.roll(quarter, 1, 0), axis=1)
        assert (
            one.is_symmetric
            and one.degrees.min() >= 8
            and np.quantile(apart, 0.9) < np.median(strangers) / 2
        )


@pytest.mark.parametrize(
    "name, nodes, edges, features, anomalous, unlabeled",
    [
        ("amazon-upu", 10_224, 351_216, 25, 693, 2288),
        ("tolokers", 11_758, 1_038_000, 10, 2566, 0),
    ],
)
def test_real_graphs(et_data, name, nodes, edges, features, anomalous, unlabeled):
    g = load_graph(name, et_data)
    assert (g.num_nodes, g.num_edges, g.num_features) == (nodes, edges, features)
    assert (
        (g.labels == 1).sum() == anomalous
        and (g.labels == -1).sum() == unlabeled
        and (g.labels[:unlabeled] == -1).all()
    )
    assert (
        g.is_symmetric
        and not g.has_self_loops
        and g.degrees.min() > 0
        and g.name == name
    )
    for fraction in (0.01, 0.4):
        parts = split(g.labels, fraction, seed=3)
        assert min(np.concatenate(parts)) >= unlabeled and len(parts.train) == round(
            fraction * (nodes - unlabeled)
        )


def test_the_first_anomalies_of_amazon_upu_come_right_after_the_unlabeled_nodes(
    et_data,
):
    anomalous = _from_npz(et_data / "graphs/anomaly/amazon_upu.npz").labels == 1
    assert np.argmax(anomalous) == 2295 and anomalous[2288:2788].sum() == 81


# ------------------------------------------------------------------------------------
# splits


@settings(max_examples=50)
@given(
    st.integers(60, 600),
    st.floats(0.1, 0.9),
    st.floats(0.05, 0.6),
    st.floats(0, 0.4),
    st.integers(0, 2**32 - 1),
)
def test_splits_are_disjoint_covering_and_stratified(
    n, share, fraction, unlabeled, seed
):
    labels = (np.arange(n) < share * n).astype(np.int8)
    labels[np.random.default_rng(0).permutation(n)[: int(unlabeled * n)]] = -1
    counts = np.bincount(labels[labels >= 0], minlength=2)
    if counts.min() * min(fraction, (1 - fraction) / 3) < 2:
        return
    parts, known = split(labels, fraction, seed), (labels >= 0).sum()
    np.testing.assert_array_equal(
        np.sort(np.concatenate(parts)), np.flatnonzero(labels >= 0)
    )
    for part, size in zip(
        parts,
        (fraction * known, (1 - fraction) * known / 3, (1 - fraction) * known * 2 / 3),
    ):
        assert abs(len(part) - size) <= 1.5 and (np.diff(part) > 0).all()
        assert abs((labels[part] == 1).sum() - len(part) * counts[1] / known) < 2
    for again, part in zip(split(labels, fraction, seed), parts):
        np.testing.assert_array_equal(again, part)


@pytest.mark.parametrize("fraction", [0.01, 0.4])
def test_seeds_share_no_more_than_chance(fraction):
    labels = (np.arange(10_000) % 10 == 0).astype(np.int8)
    splits = [split(labels, fraction, seed) for seed in range(8)]
    for p, share in enumerate((fraction, (1 - fraction) / 3, (1 - fraction) * 2 / 3)):
        common = [
            len(np.intersect1d(a[p], b[p]))
            for i, a in enumerate(splits)
            for b in splits[:i]
        ]
        size = len(splits[0][p])
        deviation = np.sqrt(size * share * (1 - share)) / np.sqrt(len(common))
        assert abs(np.mean(common) - size * share) < 6 * deviation + 1


@pytest.mark.parametrize(
    "change, match",
    [
        (
            dict(labels=np.zeros(100, int)),
            "labels, train_fraction: .*100 normal and 0 anomalous",
        ),
        (dict(labels=np.ones(100, int)), "0 normal and 100 anomalous"),
        (dict(labels=np.full(100, -1)), "0 normal and 0 anomalous"),
        (dict(labels=np.arange(100) // 98), "98 normal and 2 anomalous"),
        (
            dict(labels=np.arange(1000) // 980, train_fraction=0.01),
            "train would hold one class only",
        ),
        (dict(labels=np.arange(100) % 3), "^labels: must be 1"),
        (dict(labels=np.zeros((3, 3), int)), "^labels: "),
        (dict(train_fraction=0), "^train_fraction: must lie between 0 and 1, got 0"),
        (dict(train_fraction=1.0), "^train_fraction: "),
        (dict(train_fraction=40), "^train_fraction: "),
        (dict(train_fraction=float("nan")), "^train_fraction: "),
        (dict(train_fraction="0.4"), "^train_fraction: "),
        (dict(train_fraction=0.001), "does not give that"),
        (dict(seed=-1), "^seed: must be an integer"),
        (dict(seed=0.5), "^seed: "),
        (dict(seed=None), "^seed: "),
        (dict(seed=True), "^seed: "),
    ],
)
def test_splits_are_refused_by_name(change, match):
    with pytest.raises(ValueError, match=match):
        split(
            **{
                "labels": np.arange(100) % 4 // 3,
                "train_fraction": 0.4,
                "seed": 0,
                **change,
            }
        )
