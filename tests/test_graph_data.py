"""One container, and the same graph through every door: nbs/engine/graph_readers.ipynb.
The right values stand here; how they are read does not matter.
"""

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import doors
import networkx as nx
import numpy as np
import pandas as pd
import pytest
import scipy.io
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from et_nbdev.graph.data import (
    DATASETS,
    Graph,
    from_dgl,
    from_networkx,
    from_pandas,
    from_pyg,
    from_relations,
    from_scipy,
    load_graph,
    save_graph,
    split,
    to_networkx,
    to_pandas,
    to_scipy,
)
from et_nbdev.graph.sets import GraphSet

X, Y = np.array([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]]), [0, 1, -1]
FIELDS = ("senders", "receivers", "features", "labels")
BIG, ONES = 1582218195625938945, np.ones(2)
ENDS = np.ma.array([[0, 1], [1, 2]], mask=[[0, 1], [0, 0]])
HIDDEN = np.ma.array(X, mask=X == 6)


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ET_DATA", raising=False)
    monkeypatch.setenv("DGL_DOWNLOAD_DIR", str(tmp_path / "dgl"))


def make(senders=(0, 1, 1), receivers=(1, 2, 1), features=X, labels=Y, **more):
    return Graph(senders, receivers, features, labels, **more)


def pairs(edges):
    return list(zip(*(ends.tolist() for ends in edges)))


# --- the container


def test_a_graph_keeps_what_it_is_given_in_its_own_types_read_only():
    x = np.float32(X)
    g = make(features=x, name="small")
    dtypes = [getattr(g, key).dtype for key in FIELDS]
    assert dtypes == [np.int32, np.int32, np.float32, np.int8]
    assert np.shares_memory(g.features, x) and x.flags.writeable
    assert pairs(g.edges) == [(0, 1), (1, 2), (1, 1)]
    assert g.degrees.tolist() == [0, 2, 1]
    about = "3 nodes, 3 edges, 2 features, 50.0% anomalous of 2 labeled"
    assert repr(g) == f"Graph('small'): {about}"
    for key in FIELDS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(g, key)[0] = 0


edge_lists = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.just(n), st.lists(st.tuples(*[st.integers(0, n - 1)] * 2), max_size=14)
    )
)


def of(n, edges):
    ends = np.array(edges, np.int64).reshape(-1, 2).T
    return Graph(*ends, np.arange(2.0 * n).reshape(n, 2), np.arange(n) % 3 - 1)


@given(edge_lists, st.booleans())
def test_merging_and_mirroring_are_set_operations(case, loops):
    n, edges = case
    g, unique = of(n, edges), set(edges)
    both = unique | {(r, s) for s, r in unique}
    assert g.degrees.tolist() == [sum(r == v for _, r in edges) for v in range(n)]
    sees = [{s for s, r in unique if r == v} - {v} for v in range(n)]
    assert g.neighbors.tolist() == list(map(len, sees))
    assert g.has_parallel_edges == (len(unique) < len(edges))
    assert g.has_self_loops == any(s == r for s, r in edges)
    assert g.is_symmetric == (unique == both)
    order = lambda found: sorted(found, key=lambda e: (e[1], e[0]))
    kept = order(e for e in unique if loops or e[0] != e[1])
    assert pairs(g.simple(self_loops=loops).edges) == kept
    assert pairs(g.symmetric().edges) == order(both)
    assert g.symmetric().symmetric().digest == g.symmetric().digest
    # a counter of eight bits would come round to a few
    assert pairs(of(n, edges * 256).simple(True).edges) == order(unique)


@given(edge_lists, st.data())
def test_relations_keep_their_edges_and_their_union_is_the_edge_list(case, data):
    n, edges = case
    kinds = [data.draw(st.sampled_from("abc")) for _ in edges]
    own = {k: [e for e, kind in zip(edges, kinds) if kind == k] for k in "abc"}
    relations = {k: of(n, some).edges for k, some in own.items()}
    g = from_relations(relations, np.ones((n, 1)), np.zeros(n, int), "many")
    assert set(pairs(g.edges)) == set(edges) and not g.has_parallel_edges
    both = g.symmetric().simple()
    for k in "abc":
        assert pairs(g.relations[k]) == own[k]
        alone = g.relation(k).symmetric().simple()
        assert both.relation(k).digest == alone.digest
    with pytest.raises(ValueError, match="^kind: .*'fax'"):
        g.relation("fax")


# --- doors × oddities: (senders, receivers, data on the edges) -> a graph of three nodes


class FakeDGL:
    "As much of a DGLGraph with one type of edges as is read, where DGL is not installed."

    ntypes, canonical_etypes = ["node"], [("node", "edge", "node")]

    def __init__(self, s, r, nodes, edges=None):
        self.ends = np.array(s), np.array(r)
        self.ndata, self.edata = nodes, edges or {}

    def edges(self, etype):
        return self.ends


def pandas_door(s, r, on_edges=None, labels=Y, **options):
    edges = pd.DataFrame({"source": s, "target": r} | (on_edges or {}))
    return from_pandas(edges, pd.DataFrame(X).assign(label=labels), **options)


def networkx_door(s, r, on_edges=None, labels=Y, **options):
    graph = nx.MultiDiGraph()
    for i, row in enumerate(X):
        graph.add_node(i, features=row, label=labels[i])
    for e, ends in enumerate(zip(s, r)):
        graph.add_edge(*ends, **{key: v[e] for key, v in (on_edges or {}).items()})
    return from_networkx(graph, **options)


def pyg_door(s, r, on_edges=None, labels=Y, **options):
    on_edges = {f"edge_{k}": np.asarray(v) for k, v in (on_edges or {}).items()}
    made = dict(x=X, y=np.asanyarray(labels), edge_index=np.array([s, r])) | on_edges
    return from_pyg(SimpleNamespace(**made), **options)


def dgl_door(s, r, on_edges=None, labels=Y, **options):
    nodes = {"feature": X, "label": np.asanyarray(labels)}
    return from_dgl(FakeDGL(s, r, nodes, on_edges), **options)


def scipy_door(s, r, on_edges=None, labels=Y, **options):
    values = (on_edges or {}).get("weight", np.ones(len(s)))
    return from_scipy(sp.coo_array((values, (s, r)), (3, 3)), X, labels, **options)


CARRYING = [pandas_door, networkx_door, pyg_door, dgl_door]


@pytest.mark.parametrize("door", [*CARRYING, scipy_door])
def test_the_same_edges_and_labels_through_every_door(door):
    # an edge listed twice is one edge, and a loop stays a loop
    graph = door([0, 1, 0, 2], [1, 2, 1, 2]).simple(self_loops=True)
    assert graph.digest == Graph([0, 1, 2], [1, 2, 2], X, Y).simple(True).digest
    for labels in ([0, 1, 2], [0, 1, -2]):
        with pytest.raises(ValueError, match="labels: must be 1 .*at position 2"):
            door([0], [1], labels=labels)
    masked = np.ma.array([0, 1, 1], mask=[0, 0, 1])
    try:  # no label, or refused
        assert door([0], [1], labels=masked).labels.tolist() == [0, 1, -1]
    except ValueError as e:
        assert "labels: has masked entries" in str(e)


ON_EDGES = [(d, key) for d in CARRYING for key in ("weight", "attr", "type")]


@pytest.mark.parametrize("values", [[1.0, 2.0], [0.1, 1.0], [9.0, 9.0], [1.0, np.nan]])
@pytest.mark.parametrize("door, key", [*ON_EDGES, (scipy_door, "weight")])
def test_data_on_edges_is_refused_by_name_unless_it_is_ignored(door, key, values):
    with pytest.raises(ValueError, match=f"^weights: the edges have '(edge_)?{key}"):
        door([0, 1], [1, 2], {key: values})
    ignored = door([0, 1], [1, 2], {key: values}, weights="ignore")
    assert ignored.digest == door([0, 1], [1, 2]).digest


def of_pandas(s=(0, 1), r=(1, 2), names=None, features=None, label="label", **on_edges):
    nodes = pd.DataFrame({"x": [1.0, 2.0, 3.0]} | (features or {}), index=names)
    edges = pd.DataFrame({"source": s, "target": r} | on_edges)
    relation = next(iter(on_edges), None)
    return from_pandas(edges, nodes, relation=relation, label=label)


def of_networkx(kinds=("a", "b"), features=("x",), label="label", **more):
    made = nx.DiGraph([(0, 1, {"r": kinds[0]}), (1, 2, {"r": kinds[1]})])
    for i in made:
        made.nodes[i].update(x=1.0, **more)
    return from_networkx(made, features, label, relation="r")


def of_keys(*keys, **options):
    made = nx.MultiDiGraph([(0, 1, key, {}) for key in keys])
    nx.set_node_attributes(made, 1.0, "features")
    return from_networkx(made, **options)


def of_pyg(**more):
    whole = dict(x=X, y=Y, edge_index=np.array([[0, 1], [1, 2]]))
    return from_pyg(SimpleNamespace(**whole | more))


def of_dgl(*types, **nodes):
    graph = FakeDGL([0], [1], nodes)
    graph.ntypes = types or graph.ntypes
    return from_dgl(graph)


def of_file(**change):
    arrays = dict(senders=[0, 1], receivers=[1, 2], features=X) | change
    np.savez("x.npz", **{k: a for k, a in arrays.items() if a is not None})
    return load_graph("x.npz")


def of_mat(lacks):
    whole = {"features": X, "label": [[0, 1, 0]], "net_upu": sp.csc_array(np.eye(3))}
    scipy.io.savemat("x.mat", {k: v for k, v in whole.items() if k != lacks})
    return load_graph("x.mat")


def of_bytes(contents):
    Path("g.bin").write_bytes(contents)
    return load_graph("g.bin")


def payments(edges=lambda e: e, nodes=lambda n: n):
    "Payments between accounts by name; one account is not known."
    amounts = {"amount": [12.5, 80, 15, 3], "label": [0, 1, None, 0]}
    accounts = pd.DataFrame(amounts, index=["ann", "bob", "cy", 7])
    paid = pd.DataFrame({"source": ["ann", "bob", 7], "target": ["bob", "cy", "ann"]})
    return from_pandas(edges(paid), nodes(accounts))


def by_ids(source, names):
    nodes = pd.DataFrame({"x": np.arange(len(names), dtype=float)}, index=list(names))
    return from_pandas(pd.DataFrame({"source": source, "target": [7, 7]}), nodes)


def spoiled(kind, name, values):
    matrix = kind(np.eye(3))
    getattr(matrix, name)[:] = values
    return matrix


FILE = dict(labels=[0, 1, 0])
RING = FILE | dict(senders=[0, 1, 2], receivers=[1, 2, 0])
EYE, CSR, CSC = sp.eye_array(3), sp.csr_array, sp.csc_array
BAD = [[1, 0], [0, 1], [1, 1]]
ONE_MISSING = [1, np.nan], [0, 1], [0, 1]
SWAPPED = {"source": "from"}
REFUSED = [  # what the error says, and what is tried
    ("^senders: .* 0 to 2, got 3 at pos.* 1", lambda: make((0, 3, 1))),
    ("^receivers: .*got -1 at position 2", lambda: make(receivers=(0, 1, -1))),
    (r"^senders: .*integers of shape \(n.*float", lambda: make((0.0, 1.0, 1.0))),
    ("^senders: cannot be read as an array", lambda: make([0, [1]])),
    (r"^senders and receivers: .*\[2, 3\]", lambda: make((0, 1))),
    (r"^features: .*of shape \(N, F\), got", lambda: make(features=np.ones(3))),
    ("^features: a graph needs", lambda: make(features=np.zeros((3, 0)))),
    ("^features: .*nan at .* 1, 0", lambda: make(features=[[0.0], [np.nan], [0]])),
    ("^features: .*float32, got 1e.300", lambda: make(features=[[1e300]] * 3)),
    (r"^labels: .*\(3,\), got int64 of", lambda: make(labels=(0, 1))),
    ("^labels: .*got 256 at pos", lambda: make(labels=(0, 256, 0))),
    ("^labels: .*got 0.5", lambda: make(labels=(0, 0.5, 0))),
    ("^relations: their union", lambda: make(relations={"a": ([0], [1])})),
    (r"^relations\['a'\]: rec", lambda: make(relations={"a": ([0], [3])})),
    ("^relations: as num", lambda: make(relations={1: ([0], [1]), "1": ([1], [2])})),
    ("^relations: at least one", lambda: from_relations({}, X, Y)),
    ("^feature_names: .* 2 or none", lambda: make(feature_names=("a",))),
    ("^feature_names: 'a' is given twice", lambda: make(feature_names=("a", "a"))),
    ("^node_names: as numbers and", lambda: make(node_names=(1, "b", "1"))),
    ("^node_names: nan at pos", lambda: make(node_names=("a", "b", np.nan))),
    ("^features: has masked", lambda: make(features=HIDDEN)),
    ("^features: has masked", lambda: make(features=[*HIDDEN])),
    ("^senders: has masked", lambda: Graph(*ENDS, X, Y)),
    ("^senders: has masked", lambda: GraphSet([0, 3], *ENDS, [0])),
    # SciPy; indices out of range would write anywhere in memory
    ("^adjacency: must be a sparse", lambda: from_scipy(np.eye(3), X, Y)),
    ("ind", lambda: from_scipy(spoiled(CSR, "indices", 99), X, Y)),
    ("pointer|ind", lambda: from_scipy(spoiled(CSR, "indptr", [0, 9, 2, 0]), X, Y)),
    ("ind", lambda: from_scipy(EYE, spoiled(CSC, "indices", 99), Y)),
    (r"^labels: .*one class.*\[1, 1\] at node 2", lambda: from_scipy(EYE, X, BAD)),
    ("^labels: .*one class.* node 0", lambda: from_scipy(EYE, X, ONE_MISSING)),
    ("^labels: .*of shape", lambda: from_scipy(EYE, X, [[1, 0, 0]] * 3)),
    # PyTorch Geometric and DGL
    ("^data: .*without edge_index, y$", lambda: of_pyg(edge_index=None, y=None)),
    (
        r"edge_index: must have shape \(2, E\)",
        lambda: of_pyg(edge_index=np.ones((3, 2))),
    ),
    (
        "^weights: the edges have 'times', ",  # as many edges as nodes
        lambda: of_pyg(edge_index=np.eye(3, dtype=int)[:2], times=X, test_mask=X),
    ),
    ("^weights: .* 'weight', 'times'", lambda: of_pyg(weight=ONES, times=ONES, mask=X)),
    ("^graph: must have node data", lambda: of_dgl(feature=X)),
    ("^graph: must have node data", lambda: of_dgl(label=Y)),
    ("^graph: must have one type", lambda: of_dgl("u", "v")),
    # NetworkX
    (r"node 0 lacks 'v'; it has \['x'\]", lambda: of_networkx(features=["v"])),
    ("^relation: as numbers", lambda: of_networkx((1, True))),
    ("^label: .* but 'y'; rename", lambda: of_networkx(y=1)),
    ("^weights: the edges have 'key pay'", lambda: of_keys("pay", "call")),
    # pandas: kinds, labels, ids that went through floating point, tables
    ("^relation: None at pos", lambda: of_pandas(r_=["a", pd.NA])),
    ("^label: there is no 'f'", lambda: of_pandas(label="f")),
    ("source: 1.58.* is float64", lambda: by_ids([BIG * 1.0, 7.0], (BIG, 7))),
    ("source: .* is float32", lambda: by_ids(np.float32([2**25, 7]), (2**25, 7))),
    ("^nodes.index: 1.58.* is float64", lambda: by_ids([7, 8], (7.0, BIG * 1.0))),
    ("^edges.source: .*nan.* at row 1", lambda: by_ids([7.0, np.nan], (7, 8))),
    ("(<NA>|nan) at row 1", lambda: by_ids(pd.array([7, None], "Int64"), (7, 8))),
    ("^edges: source 8 is not in the index", lambda: by_ids([7, 8], (7, 9))),
    ("^nodes.index: True at row 1", lambda: by_ids([7, 1], (7, True))),
    ("^nodes.index: None at row 2", lambda: by_ids([7, 7], (7, "a", None))),
    ("no column 'source'", lambda: payments(lambda e: e.rename(columns=SWAPPED))),
    ("target 'dora' is not in", lambda: payments(lambda e: e.replace("cy", "dora"))),
    (
        "'ann' is in the index twice",
        lambda: payments(nodes=lambda n: pd.concat([n, n])),
    ),
    (
        "'city' must hold numbers",
        lambda: payments(nodes=lambda n: n.assign(city="Ulm")),
    ),
    (
        "^nodes: column 'age': .* got nan at position 0",
        lambda: payments(nodes=lambda n: n.assign(age=np.nan)),
    ),
    (
        "column 'amount' is there twice",
        lambda: payments(nodes=lambda n: n[["amount"] * 2]),
    ),
    ("column 'source' is there twice", lambda: payments(lambda e: e[["source"] * 2])),
    ("^edges: expected a DataFrame", lambda: payments(lambda e: "edges.csv")),
    ("^nodes: expected a DataFrame", lambda: payments(nodes=lambda n: n.values)),
    # files
    (r"edges have \['time'\]", lambda: of_file(time=[1.0, 2.0], **FILE)),
    ("but 'label'; rename it to 'labels'", lambda: of_file(label=Y)),
    ("but 'y'; rename it to 'labels'", lambda: of_file(y=Y)),
    ("^path: .*x.npz is damaged.*lacks receivers", lambda: of_file(receivers=None)),
    ("^path: .*x.npz is damaged.*senders: must hold", lambda: of_file(senders=[0, 7])),
    ("damaged.*relations/a/rec", lambda: of_file(**{"relations/a/senders": [0]})),
    (
        "damaged.*([Oo]bject arrays|pickle)",
        lambda: of_file(features=np.array([{}] * 3)),
    ),
]


def tables(key, value):
    return lambda: of_pandas(features={key: value})


KEYS = "labels", "y", "Label", "target", "class", "is_fraud", "isFraud", "label "
for key in (*KEYS, "label_0", "label1", "fraud_label", "anomaly"):
    REFUSED += [(f"^label: .* but '{key}'; rename", tables(key, [0, 1, 0]))]
    both = lambda n, key=key: n.assign(**{key: 0})
    REFUSED += [(f"^label: there is also '{key}'", lambda b=both: payments(nodes=b))]
for key in ("id", "ID", "node_id", "nodeId", "txId", "node", "Unnamed: 0"):
    REFUSED += [(f"^nodes: column '{key}' seems .*set_index", tables(key, [2, 1, 0]))]
for key in ("edge_weight", "edge_attr", "weight"):
    own = RING | {key: [0.1, 0.2, 0.3]}
    REFUSED += [(f"edges have .'{key}'", lambda own=own: of_file(**own))]
for key in ("features", "label", "net_upu"):
    REFUSED += [("x.mat .*it holds .*, not features", lambda key=key: of_mat(key))]
for raw in (b"", b"graph [\n", b"\x80\x02", b"\x89HDF\r\n", b"MATLAB 7.3 MAT"):
    REFUSED += [("^path: .*g.bin .*from_pandas", lambda raw=raw: of_bytes(raw))]


@pytest.mark.parametrize("words, door", REFUSED)
def test_what_is_no_graph_or_another_one_is_refused_by_name(words, door):
    with doors.unchecked(), pytest.raises((ValueError, TypeError), match=words):
        door()


def test_what_only_looks_odd_is_read():
    columns = {key: [1.0, 2.0, 3.0] for key in ("paid", "grid", "valid", "width")}
    assert of_pandas(features=columns).num_features == 5
    assert of_pandas(features={"y": [1, 0, 1]}, label="y").labels.tolist() == [1, 0, 1]
    with_label = {"y": [1.0, 2.0, 3.0], "label": [0, 1, 0]}  # a place, as x is
    assert of_pandas(features=with_label).feature_names == ("x", "y")
    assert of_networkx(features=["x", "y"], y=1.0).num_features == 2
    assert of_networkx(label="l", l=0, y=1).labels.tolist() == [0] * 3
    assert of_keys(0, 1).num_edges == of_keys("pay", "call", weights="ignore").num_edges
    assert list(of_pandas(r_=[1, 2]).relations) == ["1", "2"]
    objects = of_pandas(np.array([7.0, 8], object), [8, 9], [7, 8, 9])
    assert pairs(objects.edges) == [(0, 1), (1, 2)]
    masks = dict(train_masks=np.ones((10, 3), bool))
    assert of_file(**FILE, **masks).num_edges == 4
    assert (of_file().labels == -1).all()  # none are known
    masked = np.ma.array(X, mask=False)
    assert (make(features=masked).features == X).all()


@pytest.mark.parametrize(
    "column, warned",
    [
        (np.arange(60), True),  # an id: all different
        (1_700_000_000 + np.arange(60) // 3, True),  # a time, several at once
        (20_240_101 + np.zeros(60, int), True),  # a date
        (np.arange(60) // 2, False),  # a count
        (np.arange(60) / 7, False),
        (np.arange(60) > 30, False),
        (np.arange(40), False),  # too few rows to tell
    ],
)
def test_features_that_look_like_ids_or_times_are_named(column, warned):
    nodes = pd.DataFrame({"amount": np.ones(len(column)), "card": column})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        graph = from_pandas(pd.DataFrame({"source": [0], "target": [1]}), nodes)
    assert graph.feature_names == ("amount", "card")
    assert [str(w.message)[:24] for w in said] == ["nodes: columns ['card'] "] * warned


@pytest.mark.parametrize("kind", ["float64", "Int64", "boolean", "Float64", "object"])
def test_a_missing_label_of_any_kind_is_no_label(kind):
    labels = pd.array([0, 1, None, 0], dtype=kind)
    graph = payments(nodes=lambda n: n.assign(label=labels))
    assert graph.labels.tolist() == [0, 1, -1, 0]
    assert graph.node_names == ("ann", "bob", "cy", "7")
    assert pairs(graph.edges) == [(0, 1), (1, 2), (3, 0)]


@pytest.mark.parametrize(
    "kind", [np.int64, np.uint64, np.float64, np.int32, "Int64", object, str]
)
def test_whole_numbers_find_their_nodes_whatever_their_type(kind):
    big = BIG if kind in (np.int64, np.uint64, object) else 12
    edges = pd.DataFrame({"source": [big, 7], "target": [7, big]}).astype(kind)
    nodes = pd.DataFrame({"x": [0.0, 1.0, 2.0]}, index=[big + 1, big, 7])
    nodes.index = nodes.index.astype(str if kind is str else np.int64)
    assert pairs(from_pandas(edges, nodes).edges) == [(1, 2), (2, 1)]


# --- SciPy


@pytest.mark.parametrize("values", [[3, -3], [-2], [0, 2], [1] * 256, [0, 0]])
def test_an_entry_that_is_listed_is_an_edge(values):
    "Those of a byte that sum up to 256 and those that cancel, too; a zero is none."
    ends = np.zeros(len(values), int), np.ones(len(values), int)
    A = sp.coo_array((np.array(values, np.int8), ends), shape=(3, 3))
    graph = from_scipy(A, X, Y, weights="ignore")
    assert pairs(graph.edges) == [(0, 1)] * any(values)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert from_scipy(A, X, Y).digest == graph.digest
    assert ["is one edge" in str(w.message) for w in said] == [True] * (
        not {*values} <= {0, 1}
    )


@pytest.mark.parametrize("kind, total", [("uint8", 300), ("bool", 1)])
def test_entries_of_one_place_are_added_up_without_wrapping(kind, total):
    at = ([0, 0], [0, 0])
    features = sp.coo_array((np.array([200, 100]).astype(kind), at), shape=(3, 1))
    assert from_scipy(sp.eye(3), features, Y).features[0, 0] == total
    with pytest.raises(ValueError, match="labels: must be 1"):
        from_scipy(sp.eye(3), X, sp.coo_array((np.uint8([255, 2]), at), shape=(3, 1)))


@pytest.mark.parametrize(
    "labels", [[0, 1, 0], [[0], [1], [0]], [[0.0, 1.0, 0.0]], [[1, 0], [0, 1], [1, 0]]]
)
def test_labels_of_every_published_shape(labels):
    assert from_scipy(EYE, X, np.array(labels)).labels.tolist() == [0, 1, 0]


# --- there and back

ROUND = {  # None: to the union
    "pandas": lambda g, kind: from_pandas(*to_pandas(g), relation=kind),
    "networkx": lambda g, kind: from_networkx(to_networkx(g), relation=kind),
    "scipy": lambda g, _: from_scipy(to_scipy(g), g.features, g.labels),
    "file": lambda g, _: g,
}


@pytest.mark.parametrize("way", ROUND)
@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("named", [False, True])
def test_there_and_back(way, kinds, named, tmp_path):
    rng = np.random.default_rng(0)
    ends, names = rng.integers(0, 12, (2, 40)), tuple("abcd") if named else ()
    x, y = rng.normal(size=(12, 4)), np.arange(12) % 3 - 1
    graph = Graph(*ends, x, y, feature_names=names).simple(self_loops=True)
    if kinds == 2:
        parts = {"a call": ends[:, :20], "mail": ends[:, 15:]}
        parts = {kind: Graph(*e, x, y).simple(True).edges for kind, e in parts.items()}
        graph = replace(from_relations(parts, x, y), feature_names=names)
    found = ROUND[way](graph, "relation" if kinds == 2 else None)
    path = str(tmp_path / "GRAPH.mat")  # known by its contents, not by its name
    save_graph(replace(found, name="kept", node_names="ABCDEFGHIJKL"), path)
    found = load_graph(path)
    assert found.digest == graph.symmetric().simple().digest
    assert found.name == "kept" and found.node_names == tuple("ABCDEFGHIJKL")
    by_name = way in ("pandas", "networkx", "file")
    assert not (named and by_name) or found.feature_names == names
    assert list(found.relations) == list(graph.relations)


def test_an_undirected_edge_is_two_and_a_matrix_counts_edges():
    made = nx.Graph([("a", "b"), ("b", "b")])
    for i, node in enumerate("ab"):
        made.nodes[node].update(x=i, y=i > 0)
    made.nodes["b"]["label"] = 1
    graph = from_networkx(made, ["x", "y"])
    assert sorted(pairs(graph.edges)) == [(0, 1), (1, 0), (1, 1)]
    assert graph.feature_names == ("x", "y") and graph.labels.tolist() == [-1, 1]
    assert graph.features.tolist() == [[0, 0], [1, 1]]
    assert graph.node_names == ("a", "b")
    with pytest.raises(ValueError, match="edge .'a', 'b'. has no 'kind'"):
        from_networkx(made, "y", relation="kind")
    twice = make((0, 0), (1, 1))
    assert to_scipy(twice).toarray()[0, 1] == 2
    assert to_networkx(twice).is_multigraph() > to_networkx(make()).is_multigraph()


@pytest.mark.parametrize("export", [to_pandas, to_networkx])
@pytest.mark.parametrize("name", ["label", "node", "features", "x", "node_for_adding"])
def test_a_feature_survives_the_export_or_is_refused_by_name(export, name):
    graph = make(feature_names=("age", name))
    if name == "label":
        with pytest.raises(ValueError, match="^feature_names: 'label'"):
            export(graph)
        return
    made = export(graph)
    nodes = made[1] if export is to_pandas else dict(made.nodes(data=True))
    found = nodes[name] if export is to_pandas else [n[name] for n in nodes.values()]
    assert list(found) == [5.0, 6.0, 7.0]


@pytest.mark.parametrize(
    "way, module", [(to_pandas, "pandas"), (to_networkx, "networkx")]
)
def test_a_missing_library_is_named_with_what_installs_it(monkeypatch, way, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=f"{module}.*pip install"):
        way(make())


# --- files

NETS = {"Amazon.mat": ("net_upu", "net_usu", "net_uvu"), "YelpChi.mat": ("net_rsr",)}


def write_mat(path, n=3400):
    "The layout of the published files: sparse doubles, label (1, N), the union beside."
    noise, nets = np.random.default_rng(1), {}
    for d, net in enumerate(NETS[path.name], 1):
        ends = noise.integers(0, n - d, (2, 2 * n))
        A = sp.coo_matrix((np.ones(2 * n), ends), shape=(n, n)).tocsc()
        A.setdiag(0)
        nets[net] = ((A + A.T) > 0).astype(float).tocsc()
    x = np.where(noise.random((n, 25)) < 0.5, 0, noise.normal(size=(n, 25)) * 100)
    label = (np.arange(n) % 7 == 6).astype(float)[None]
    arrays = {"homo": sum(nets.values()), **nets, "features": sp.csc_matrix(x)}
    path.parent.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(path, {**arrays, "label": label}, do_compression=True)
    return nets, x.astype(np.float32), label[0]


@pytest.mark.parametrize("name, file", [*zip(("amazon", "yelp"), NETS)])
def test_mat_files_as_they_are_published(tmp_path, name, file):
    nets, x, label = write_mat(tmp_path / "graphs" / "anomaly" / file)
    g = load_graph(name, tmp_path)
    assert list(g.relations) == list(nets) and g.name == name
    for net, A in nets.items():
        wanted = zip(*(i.tolist() for i in A.nonzero()))
        assert set(pairs(g.relations[net])) == set(wanted)
    np.testing.assert_array_equal(g.features, x)
    unknown = DATASETS[name].unlabeled
    assert unknown == (3305 if name == "amazon" else 0)
    assert (g.labels[:unknown] == -1).all()
    assert (g.labels[unknown:] == label[unknown:]).all()


def test_amazon_upu_is_one_relation_without_its_isolated_nodes(tmp_path):
    nets, x, label = write_mat(tmp_path / "Amazon.mat")
    A = nets["net_upu"].toarray() > 0
    kept = np.flatnonzero(A.any(0))
    assert 0 < len(kept) < 3400, "the case needs isolated nodes"
    g = load_graph("amazon-upu", tmp_path)
    np.testing.assert_array_equal(g.features, x[kept])
    np.testing.assert_array_equal(g.labels, np.where(kept < 3305, -1, label[kept]))
    dense = np.zeros((len(kept),) * 2)
    dense[g.edges] = 1
    np.testing.assert_array_equal(dense, A[np.ix_(kept, kept)])
    save_graph(make((0, 1), (1, 0), labels=(0, 1, 1)), tmp_path / "amazon_upu.npz")
    found = load_graph("amazon-upu", tmp_path)  # the file comes first
    assert (found.labels == -1).all()


def test_an_npz_of_another_layout(tmp_path):
    "Platonov et al.: each undirected edge once, and masks of ten splits."
    masks = np.zeros((10, 3), bool)
    arrays = dict(node_features=X, node_labels=[0, 1, 0], edges=[[0, 1], [1, 2]])
    np.savez(tmp_path / "tolokers.npz", train_masks=masks, **arrays)
    g = load_graph("tolokers", tmp_path)
    assert pairs(g.edges) == [(1, 0), (0, 1), (2, 1), (1, 2)] and g.name == "tolokers"


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    save_graph(make(name="old"), tmp_path / "new folder" / "x.npz")

    def full(file, **arrays):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="x.npz"):
        save_graph(make(), tmp_path / "new folder" / "x.npz")
    assert load_graph(str(tmp_path / "new folder" / "x.npz")).name == "old"
    assert [p.name for p in (tmp_path / "new folder").iterdir()] == ["x.npz"]


def test_every_damaged_bit_of_an_array_is_noticed(tmp_path):
    "In its header, too: by this one it is a smaller array, which numpy.load would take."
    path, x = tmp_path / "x.npz", np.random.default_rng(0).normal(size=(3, 9000))
    save_graph(make(features=x), path)
    raw = path.read_bytes()
    at = raw.index(np.float32(x).tobytes())
    flip = lambda i: raw[:i] + bytes([raw[i] ^ 4]) + raw[i + 1 :]
    smaller = raw.replace(b"(3, 9000)", b"(3, 1000)")
    for damaged in (smaller, *(flip(i) for i in range(at - 40, at + 80, 7))):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="x.npz is damaged"):
            load_graph(str(path))


# --- DGL


@pytest.mark.parametrize("name, onehot", [("tfinance", True), ("tsocial", False)])
def test_dgl_files_as_they_are_published(tmp_path, monkeypatch, name, onehot):
    monkeypatch.setenv("DGLBACKEND", "pytorch")
    dgl = pytest.importorskip("dgl", reason="DGL: make test DGL=1, Python 3.11")
    import torch

    g = dgl.graph(tuple(torch.randint(0, 40, (2, 150))), num_nodes=40)
    g.ndata["feature"] = torch.randn(40, 10, dtype=torch.float64, requires_grad=True)
    y = torch.arange(40) % 2
    g.ndata["label"] = torch.nn.functional.one_hot(y) if onehot else y
    want = from_dgl(g, name)
    assert want.features.shape == (40, 10) and (want.labels == y.numpy()).all()
    g.ndata["feature"] = g.ndata["feature"].detach()
    dgl.save_graphs(str(tmp_path / name), [g])
    found = load_graph(name, tmp_path)
    assert (found.digest, found.name) == (want.symmetric().simple().digest, name)
    own = tmp_path / "mine.bin"
    own.write_bytes((tmp_path / name).read_bytes()[:300])
    with pytest.raises(ValueError, match="mine.bin is damaged"):
        load_graph(str(own))


def test_without_dgl_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "dgl", None)
    (tmp_path / "tsocial").write_bytes(bytes.fromhex("3fa1b446f04f2edd"))
    with pytest.raises(ImportError, match=r"pip install 'et_nbdev\[dgl\]'"):
        load_graph("tsocial", tmp_path)
    for name in ("amazon", "yelp", "amazon-upu"):
        with pytest.raises(FileNotFoundError, match=r"CARE-GNN \(.*et_nbdev\[dgl\]'"):
            load_graph(name, tmp_path)


# --- by name


def test_unknown_names_and_missing_files(tmp_path, monkeypatch):
    for name in ("cora", str(tmp_path), str(tmp_path / "missing.npz")):
        with pytest.raises(ValueError, match=f"name: must be .*yelp.*, got '{name}'"):
            load_graph(name)
    with pytest.raises(ValueError, match="root: .*nowhere is not a folder"):
        load_graph("tolokers", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="root or ET_DATA names. Neither does"):
        load_graph("tolokers")
    monkeypatch.setenv("ET_DATA", str(tmp_path / "data"))
    with pytest.raises(FileNotFoundError) as e:
        load_graph("tolokers", tmp_path)
    for folder in (tmp_path / "graphs" / "anomaly", tmp_path, tmp_path / "data"):
        assert str(folder / "tolokers.npz") in str(e.value)


def test_root_comes_before_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ET_DATA", str(tmp_path / "env"))
    for folder, labels in (("env", (0, 0, 1)), ("root", (1, 1, 0))):
        save_graph(make(labels=labels), tmp_path / folder / "tolokers.npz")
        found = load_graph("tolokers", tmp_path / "root" if folder == "root" else None)
        assert found.labels.tolist() == list(labels)


def test_the_graphs_that_are_always_there():
    "Results, weights and figures rest on them."
    assert load_graph("digits-knn").digest == "f195bfd50b5ce7f9"
    assert load_graph("digits-relations").digest == "162630452eaae5ac"


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
    assert (g.labels == 1).sum() == anomalous and g.degrees.min() > 0
    assert (g.labels[:unlabeled] == -1).all() and (g.labels == -1).sum() == unlabeled
    assert g.is_symmetric and not g.has_self_loops and g.name == name
    if unlabeled:  # the first anomalies come right after the nodes without a label
        assert np.argmax(g.labels == 1) == 2295


# --- splits


@settings(max_examples=50)
@given(
    st.integers(60, 600),
    st.floats(0.1, 0.9),
    st.floats(0.05, 0.6),
    st.floats(0, 0.4),
    st.integers(0, 2**32 - 1),
)
def test_splits_are_disjoint_covering_and_stratified(n, share, fraction, unknown, seed):
    labels = (np.arange(n) < share * n).astype(np.int8)
    labels[np.random.default_rng(0).permutation(n)[: int(unknown * n)]] = -1
    counts = np.bincount(labels[labels >= 0], minlength=2)
    if counts.min() * min(fraction, (1 - fraction) / 3) < 2:
        return
    parts, known = split(labels, fraction, seed), counts.sum()
    covered = np.sort(np.concatenate(parts))
    np.testing.assert_array_equal(covered, np.flatnonzero(labels >= 0))
    for part, size in zip(
        parts, (fraction, (1 - fraction) / 3, (1 - fraction) * 2 / 3)
    ):
        assert abs(len(part) - size * known) <= 1.5 and (np.diff(part) > 0).all()
        assert abs((labels[part] == 1).sum() - len(part) * counts[1] / known) < 2
    assert all(map(np.array_equal, split(labels, fraction, seed), parts))


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(labels=np.zeros(100, int)), "labels, .*100 normal and 0 anomalous"),
        (dict(labels=np.full(100, -1)), "0 normal and 0 .*no node is labeled"),
        (dict(labels=np.arange(1000) // 980, train_fraction=0.01), "one class only"),
        (dict(labels=np.arange(100) % 3), "^labels: must be 1"),
        (dict(labels=np.zeros((3, 3), int)), "^labels: "),
        *((dict(train_fraction=f), "^train_fraction: ") for f in (0, 40, np.nan, "½")),
        (dict(train_fraction=0.001), "does not give that"),
        *((dict(seed=s), "^seed: expected") for s in (-1, 0.5, True)),
    ],
)
def test_splits_are_refused_by_name(change, match):
    given = {"labels": np.arange(100) % 4 // 3, "train_fraction": 0.4, "seed": 0}
    with doors.unchecked(), pytest.raises(ValueError, match=match):
        split(**given | change)


def test_seeds_share_no_more_than_chance():
    labels = (np.arange(10_000) % 10 == 0).astype(np.int8)
    first, *others = (split(labels, 0.4, seed).train for seed in range(8))
    common = [np.isin(other, first).mean() for other in others]
    assert abs(np.mean(common) - 0.4) < 0.01
