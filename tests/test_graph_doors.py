"""The same graph through every door, and the oddities of graphs as strangers have them.
The right values stand here; how they are read does not matter.
"""

from dataclasses import replace
from types import SimpleNamespace

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.model_selection import (
    GridSearchCV,
    KFold,
    cross_val_score,
    train_test_split,
)

from et_nbdev.graph.classify import ClassifyTraining
from et_nbdev.graph.data import (
    Graph,
    from_networkx,
    from_pandas,
    from_pyg,
    from_scipy,
    load_graph,
    save_graph,
    to_networkx,
    to_pandas,
)
from et_nbdev.graph.detector import AnomalyDetector
from et_nbdev.graph.set_classifier import GraphSetClassifier
from et_nbdev.graph.sets import GraphSet, load_graphs

X, Y = np.array([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]]), [0, 1, -1]


# ------------------------------------------------------------------------------------
# doors: (senders, receivers, data on the edges, …) -> a graph of three nodes


def pandas_door(s, r, on_edges=None, weights="refuse", labels=Y):
    edges = pd.DataFrame({"source": s, "target": r} | (on_edges or {}))
    nodes = pd.DataFrame(X, columns=["a", "b"]).assign(label=labels)
    return from_pandas(edges, nodes, weights=weights)


def networkx_door(s, r, on_edges=None, weights="refuse", labels=Y):
    graph = nx.MultiDiGraph()
    for i, row in enumerate(X):
        graph.add_node(i, features=row, label=labels[i])
    for e, ends in enumerate(zip(s, r)):
        own = {key: values[e] for key, values in (on_edges or {}).items()}
        graph.add_edge(*ends, **own)
    return from_networkx(graph, weights=weights)


def pyg_door(s, r, on_edges=None, weights="refuse", labels=Y):
    on_edges = {f"edge_{k}": np.asarray(v) for k, v in (on_edges or {}).items()}
    data = SimpleNamespace(x=X, y=np.asarray(labels), edge_index=np.array([s, r]))
    vars(data).update(on_edges)
    return from_pyg(data, weights=weights)


def scipy_door(s, r, labels=Y):
    return from_scipy(sp.coo_array((np.ones(len(s)), (s, r)), (3, 3)), X, labels)


def file_door(s, r, tmp_path, labels=Y):
    save_graph(Graph(s, r, X, labels), tmp_path / "g")
    return load_graph(str(tmp_path / "g"))


TABLES = [pandas_door, networkx_door, pyg_door]
DOORS = [*TABLES, scipy_door]


@pytest.mark.parametrize("door", DOORS)
def test_the_same_edges_through_every_door(door):
    wanted = Graph([0, 1, 2], [1, 2, 2], X, Y).simple(self_loops=True)
    # an edge listed twice is one edge, and a loop stays a loop
    graph = door([0, 1, 0, 2], [1, 2, 1, 2]).simple(self_loops=True)
    assert replace(graph, feature_names=()).digest == wanted.digest


@pytest.mark.parametrize("weights", [[1.0, 2.0], [1.0, 1.0]])
@pytest.mark.parametrize("key", ["weight", "capacity", "attr", "type"])
@pytest.mark.parametrize("door", TABLES)
def test_data_on_edges_is_refused_by_name_unless_it_is_ignored(door, key, weights):
    with pytest.raises(ValueError, match=f"^weights: the edges have '(edge_)?{key}'"):
        door([0, 1], [1, 2], {key: weights})
    plain = door([0, 1], [1, 2])
    assert door([0, 1], [1, 2], {key: weights}, "ignore").digest == plain.digest


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 1, -2]])
def test_labels_that_are_no_labels_are_named(door, labels):
    with pytest.raises(ValueError, match="labels?: must be 1 .*at node 2"):
        door([0], [1], labels=labels)


# ------------------------------------------------------------------------------------
# ids


BIG = 1582218195625938945


def nodes_called(*names):
    return pd.DataFrame({"x": np.arange(len(names), dtype=float)}, index=list(names))


@pytest.mark.parametrize(
    "source, names, words",
    [
        ([float(BIG), 7.0], (BIG, BIG + 1, 7), "edges.source: 1.58.* is float64"),
        ([7.0, 7.5], (BIG, BIG + 1, 7), "edges.source: .*7.5.* at row 1"),
        ([7.0, np.nan], (7, 8), "edges.source: .*nan.* at row 1"),
        (np.float32([2**25, 7]), (2**25, 7), "edges.source: .* is float32"),
        ([7, 8], (7.0, float(BIG)), "nodes.index: 1.58.* is float64"),
        ([7, 8], (7, 9), "edges: source 8 is not in the index"),
    ],
)
def test_an_id_that_names_no_node_for_certain_is_refused(source, names, words):
    edges = pd.DataFrame({"source": source, "target": [7, 7]})
    with pytest.raises(ValueError, match=f"^{words}"):
        from_pandas(edges, nodes_called(*names))


@pytest.mark.parametrize(
    "kind", [np.int64, np.uint64, np.float64, np.int32, "Int64", object, str]
)
def test_whole_numbers_find_their_nodes_whatever_their_type(kind):
    big = BIG if kind in (np.int64, np.uint64, object) else 12
    edges = pd.DataFrame({"source": [big, 7], "target": [7, big]}).astype(kind)
    nodes = nodes_called(big + 1, big, 7)
    nodes.index = nodes.index.astype(str if kind is str else np.int64)
    graph = from_pandas(edges, nodes)
    assert graph.senders.tolist() == [1, 2] and graph.receivers.tolist() == [2, 1]
    assert graph.node_names == (str(big + 1), str(big), "7")


def test_names_of_nodes_stay_with_them(tmp_path):
    edges = pd.DataFrame({"source": ["b", "a"], "target": ["a", "c"]})
    graph = from_pandas(edges, nodes_called(*"abc"))
    assert graph.node_names == ("a", "b", "c")
    save_graph(graph, tmp_path / "g.npz")
    assert load_graph(str(tmp_path / "g.npz")).node_names == ("a", "b", "c")
    again = from_pandas(*to_pandas(graph))
    assert (again.digest, again.node_names) == (graph.digest, graph.node_names)
    with pytest.raises(ValueError, match="^node_names: must be one for each of the 3"):
        replace(graph, node_names=("a",))


# ------------------------------------------------------------------------------------
# matrices, tables, files


@pytest.mark.parametrize("kind", ["bsr", "coo", "csc", "csr", "dia", "dok", "lil"])
@pytest.mark.parametrize("make", [sp.coo_array, sp.coo_matrix])
def test_every_kind_of_sparse_matrix_is_one(kind, make):
    A = make(([1.0, 1.0], ([0, 1], [1, 2])), shape=(3, 3)).asformat(kind)
    assert from_scipy(A, X, Y).edges[0].tolist() == [0, 1]
    assert from_scipy(A, sp.csr_array(X), sp.csr_array([[0], [1], [0]])).num_edges == 2


@pytest.mark.parametrize(
    "values, edges",
    [
        (np.ones(257, np.uint8), 1),
        (np.ones(257, np.int8), 1),
        (np.ones(2, bool), 1),
        (np.array([3, -3]), 1),
        (np.array([np.inf, -np.inf]), 1),
        (np.array([0.0, 0.0]), 0),
        (np.array([0.0, 2.0]), 1),
    ],
)
def test_an_edge_that_is_listed_is_an_edge(values, edges):
    s = np.zeros(len(values), int)
    A = sp.coo_array((values, (s, s + 1)), shape=(3, 3))
    assert from_scipy(A, X, Y).num_edges == edges


@pytest.mark.parametrize(
    "labels, words",
    [
        ([[1, 0], [0, 1], [1, 1]], r"\[1, 1\] at node 2"),
        ([[1, 0], [0, 0], [0, 1]], r"\[0, 0\] at node 1"),
        ([[1, 0], [np.nan, 1], [0, 1]], "at node 1"),
        (sp.csr_array([[1, 0], [0, 1], [1, 1]]), "at node 2"),
    ],
)
def test_a_bad_row_of_one_hot_labels_is_named_by_its_node(labels, words):
    with pytest.raises(
        ValueError, match=f"^labels: each node needs one class.*{words}"
    ):
        from_scipy(sp.eye_array(3).tocsr(), X, labels)


@pytest.mark.parametrize("twice", ["age", "label", "source", "relation"])
def test_a_column_that_is_there_twice_is_named(twice):
    edges = pd.DataFrame({"source": [0], "target": [1], "relation": ["r"]})
    nodes = pd.DataFrame({"age": [1.0, 2.0], "label": [0, 1]})
    if twice in edges:
        edges = pd.concat([edges, edges[[twice]]], axis=1)
    else:
        nodes = pd.concat([nodes, nodes[[twice]]], axis=1)
    with pytest.raises(ValueError, match=f"column '{twice}' is there twice"):
        from_pandas(edges, nodes, relation="relation")


@pytest.mark.parametrize("export", [to_pandas, to_networkx])
@pytest.mark.parametrize("name", ["label", "node", "features", "x", "node_for_adding"])
def test_a_feature_survives_the_export_or_is_refused_by_name(export, name):
    graph = Graph([0], [1], X, Y, feature_names=("age", name))
    if name == "label":
        with pytest.raises(ValueError, match="^feature_names: 'label'"):
            export(graph)
        return
    made = export(graph)
    found = (
        made[1][name]
        if export is to_pandas
        else [made.nodes[i][name] for i in (0, 1, 2)]
    )
    assert list(found) == [5.0, 6.0, 7.0]


@pytest.mark.parametrize("name", ["GRAPH.NPZ", "graph", "graph.dat", "graph.mat"])
def test_a_file_is_known_by_its_contents(tmp_path, name):
    graph = Graph([0, 1], [1, 0], X, Y)
    save_graph(graph, tmp_path / name)
    assert load_graph(str(tmp_path / name)).digest == graph.simple().digest


@pytest.mark.parametrize(
    "name, contents, words",
    [
        ("g.gml", b"graph [\n node [", "is no graph that can be read"),
        ("g.pt", b"\x80\x02", "is no graph that can be read"),
        ("g.json", b"{}", "is no graph that can be read"),
        ("g.h5", b"\x89HDF\r\n", "but HDF5: in MATLAB, save it with -v7"),
        ("g.mat", b"MATLAB 7.3 MAT-file", "."),
    ],
)
def test_a_foreign_file_is_not_called_another_librarys(tmp_path, name, contents, words):
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(ValueError, match=f"^(name|path): .*{words}") as said:
        load_graph(str(tmp_path / name))
    assert "DGL:" not in str(said.value) and "by DGL" not in str(said.value)


# ------------------------------------------------------------------------------------
# the detector, and sets of graphs


def test_what_attention_does_not_see_changes_no_score():
    rng = np.random.default_rng(0)
    s, r = rng.integers(40, size=(2, 150))
    graph = (
        Graph(s, r, rng.normal(size=(40, 3)), np.arange(40) % 2).symmetric().simple()
    )
    more = (
        np.append(graph.senders, [graph.senders[0], 5]),
        np.append(graph.receivers, [graph.receivers[0], 5]),
    )
    listed = replace(graph, senders=more[0], receivers=more[1])
    assert (listed.neighbors == graph.degrees).all()
    sizes = dict(dim=8, num_heads=1, head_dim=4, num_memories=8, steps=1)
    detector = AnomalyDetector(training_steps=2, every=1, **sizes)
    detector.fit(graph)
    a, b = (detector.predict_proba(g) for g in (graph, listed))
    np.testing.assert_array_equal(a, b)


def pair():
    return GraphSet([0, 2, 4], [0, 1, 2, 3], [1, 0, 3, 2], [0, 1], [-1, 1])


def test_a_set_is_a_sequence():
    graphs = pair()
    assert [one.num_nodes for one in graphs] == [2, 2]
    assert len(list(zip(graphs, "ab"))) == 2 and graphs.shape == (2,)
    assert graphs[-1].digest == graphs[1].digest == graphs[[-1]].digest
    assert graphs[np.array([True, False])].digest == graphs[:1].digest
    for wrong in (2, -3):
        with pytest.raises(ValueError, match=f"ids: .*got {wrong}"):
            graphs[wrong]


def test_the_tools_of_scikit_learn_make_folds_of_a_set():
    graphs = load_graphs("rings")[:40]
    classes = graphs.classes[graphs.labels]
    parts = train_test_split(graphs, test_size=10, random_state=0, stratify=classes)
    assert [len(part) for part in parts[:1]] == [30] and isinstance(parts[0], GraphSet)

    class Quick(GraphSetClassifier):
        "Fits nothing, and remembers what it was given."

        def fit(self, graphs, y=None):
            self.given_ = graphs
            return self

        def score(self, graphs, y=None):
            assert isinstance(self.given_, GraphSet) and isinstance(graphs, GraphSet)
            return len(self.given_) / 100 + len(graphs)

    folds = KFold(4, shuffle=True, random_state=0)
    assert cross_val_score(Quick(), graphs, cv=folds).tolist() == [10.3] * 4
    grid = GridSearchCV(
        Quick(), {"config": [None, ClassifyTraining(epochs=2)]}, cv=folds
    )
    assert len(grid.fit(graphs).best_estimator_.given_) == 40


def test_classes_that_a_classifier_does_not_know_are_named():
    class Trained(GraphSetClassifier):
        classes_ = np.array([-1, 1])

        def predict(self, graphs):
            return self.classes_[[0, 1]]

    assert Trained().score(pair()) == 1
    with pytest.raises(ValueError, match=r"^graphs: hold the classes \[0\], which"):
        Trained().score(replace(pair(), classes=[0, 1]))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_text_may_begin_with_a_mark_and_end_its_lines_in_any_way(
    tmp_path, encoding, end
):
    (folder := tmp_path / "MINE").mkdir()
    texts = {"A": "1, 2\n2, 1\n", "graph_indicator": "1\n1\n", "graph_labels": "1\n\n"}
    for part, text in texts.items():
        (folder / f"MINE_{part}.txt").write_bytes(
            text.replace("\n", end).encode(encoding)
        )
    assert len(load_graphs("MINE", tmp_path)) == 1
