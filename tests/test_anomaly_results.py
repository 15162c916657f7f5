"""The script behind notebook 35: it fills its tables on files of the published formats,
goes on where it stopped, and runs nothing twice.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from test_graph_data import write_mat

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("compiled_once", "compile_quickly")
FEW = "--ratios 0.4 --trials 2 --seeds 2 --epochs 3".split()


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(
        "anomaly_results", ROOT / "experiments/anomaly_results.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def data(monkeypatch, tmp_path, script):
    monkeypatch.setenv("ET_DATA", str(tmp_path))
    for cached in (script.graph_of, script.features_of, script.edges_of):
        cached.cache_clear()
    return tmp_path


def rows(folder):
    return {p.stem: json.loads(p.read_text()) for p in folder.iterdir()}


def test_a_row_of_yelpchi_from_its_file(data, script, monkeypatch):
    # models that are compiled soon; the spaces themselves have a test below
    small = dict(dim=[8], num_memories=[8], num_heads=[2], head_dim=[4], steps=[1])
    monkeypatch.setitem(script.SPACES, "et", script.SPACES["et"] | small)
    write_mat(data / "YelpChi.mat", n=300)
    hops = ["et-2hop", "bwgnn-2hop", "forest-2hop"]
    lines = ["et", "et-max", *hops, "et-no-attention"]
    out = ["--out", str(data / "out")]
    script.main(["--data", "yelp", *FEW, *out, "--lines", "mlp"])
    script.main(["--data", "yelp", *FEW, *out, "--trials", "1", "--lines", *lines])
    found = rows(data / "out")
    assert set(found) == {f"yelp-0.4-{line}" for line in ("mlp", *lines)}
    for name, row in found.items():
        trials = {"yelp-0.4-mlp": 2, "yelp-0.4-et-no-attention": 0}.get(name, 1)
        assert len(row["trials"]) == trials
        assert [run["seed"] for run in row["runs"]] == [0, 1]
        for run in row["trials"] + row["runs"]:
            assert all(
                0 <= run[part][score] <= 1
                for part in ("validation", "test")
                for score in ("macro_f1", "auroc", "auprc", "recall_at_k")
            )
        assert row["commit"] and row["config"] == row["runs"][0]["config"]
    best = max(found["yelp-0.4-mlp"]["trials"], key=script.merit)  # by validation alone
    assert best["config"] == found["yelp-0.4-mlp"]["config"]
    assert found["yelp-0.4-et-no-attention"]["config"] == found["yelp-0.4-et"][
        "config"
    ] | {"num_heads": 0}


def test_edges_of_a_second_kind_link_nodes_with_similar_features(script):
    plain, graph = (
        script.graph_of(name) for name in ("digits-knn", "digits-knn-alike")
    )
    assert graph.name == "digits-knn-alike" and {*graph.relations} == {"own", "alike"}
    assert np.array_equal(graph.features, plain.features)
    assert np.array_equal(graph.labels, plain.labels)
    edges = lambda ends: set(zip(*map(np.ndarray.tolist, ends)))
    assert edges(graph.relations["own"]) == edges(plain.edges)
    x = plain.features - plain.features.mean(0)
    x = x / np.where(x.std(0) > 0, x.std(0), 1)
    far = ((x[:, None] - x[None]) ** 2).sum(-1)
    np.fill_diagonal(far, np.inf)  # no node is its own neighbor
    alike = edges(graph.relations["alike"])
    for b in range(0, graph.num_nodes, 97):
        mine = {c for c, to in alike if to == b}
        nearest = np.argsort(far[b])[:8]
        chose = {c for c in mine if far[b, c] <= np.sort(far[c])[7] + 1e-6}
        assert set(nearest) <= mine and mine <= set(nearest) | chose


def test_a_row_of_tfinance_from_its_file(data, script, monkeypatch):
    monkeypatch.setenv("DGLBACKEND", "pytorch")
    dgl = pytest.importorskip(
        "dgl", reason="DGL is not installed: make test DGL=1, Python 3.11"
    )
    import torch

    noise = np.random.default_rng(0)
    graph = dgl.graph(
        tuple(torch.from_numpy(noise.integers(0, 200, (2, 800)))), num_nodes=200
    )
    graph.ndata["feature"] = torch.from_numpy(
        noise.normal(size=(200, 10)).astype(np.float32)
    )
    graph.ndata["label"] = torch.from_numpy((np.arange(200) % 5 == 0).astype(np.int64))
    dgl.save_graphs(str(data / "tfinance"), [graph])
    script.main(
        [
            "--data",
            "tfinance",
            *FEW,
            "--out",
            str(data / "out"),
            "--lines",
            "bwgnn",
            "boosting",
        ]
    )
    assert set(rows(data / "out")) == {"tfinance-0.4-bwgnn", "tfinance-0.4-boosting"}


def test_a_stopped_run_goes_on_and_ends_with_the_same_numbers(
    data, script, monkeypatch
):
    line = ["--data", "digits-relations", *FEW, "--lines", "mlp", "--out"]
    script.main([*line, str(data / "whole")])
    evaluate, calls = script.evaluate, []

    def stop_after_three(*args):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(args)
        return evaluate(*args)

    monkeypatch.setattr(script, "evaluate", stop_after_three)
    with pytest.raises(SystemExit, match="stopped"):
        script.main([*line, str(data / "parts")])
    (half,) = rows(data / "parts").values()
    assert len(half["trials"]) == 2 and len(half["runs"]) == 1
    monkeypatch.setattr(script, "evaluate", evaluate)
    script.main([*line, str(data / "parts")])
    (whole,), (parts,) = (rows(data / kind).values() for kind in ("whole", "parts"))
    strip = lambda row: [
        {k: v for k, v in run.items() if k != "seconds"}
        for run in row["trials"] + row["runs"]
    ]
    assert strip(whole) == strip(parts) and whole["config"] == parts["config"]
    monkeypatch.setattr(
        script,
        "evaluate",
        lambda *_: pytest.fail("a line that is complete was run again"),
    )
    script.main([*line, str(data / "parts")])


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["--data", "cora"], "cora"),
        (["--ratios", "1.5"], "between 0 and 1"),
        (["--trials", "0"], "at least 1"),
        (["--part", "2/2"], "i/n"),
    ],
)
def test_what_cannot_be_is_refused(data, script, capsys, wrong, message):
    with pytest.raises(SystemExit):
        script.main([*wrong, "--out", str(data / "out")])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("trials, wrong", [(None, []), (0, []), (7, ["--search"])])
def test_changes_wait_for_what_they_change(data, script, trials, wrong):
    "Another process may still be at it."
    if trials is not None:
        (data / "out").mkdir()
        record = {
            "data": "digits-knn",
            "ratio": 0.4,
            "line": "et",
            "epochs": 100,
            "trials": [{}] * trials,
            "runs": [],
        }
        (data / "out/digits-knn-0.4-et.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit, match="needs another line first .*-0.4-et.json"):
        script.main(
            [
                *wrong,
                "--data",
                "digits-knn",
                "--ratios",
                "0.4",
                *(wrong or ["--lines", "et-no-memories"]),
                "--out",
                str(data / "out"),
            ]
        )


def test_another_number_of_epochs_is_not_mixed_in(data, script):
    (data / "digits-knn-0.4-mlp.json").write_text(
        json.dumps(
            {
                "data": "digits-knn",
                "ratio": 0.4,
                "line": "mlp",
                "epochs": 100,
                "trials": [],
                "runs": [],
            }
        )
    )
    with pytest.raises(SystemExit, match="--epochs: .* was made with 100, got 3"):
        script.main(
            ["--data", "digits-knn", *FEW, "--lines", "mlp", "--out", str(data)]
        )


def test_a_missing_file_ends_in_one_line(data, script):
    with pytest.raises(
        SystemExit, match="Neither root nor the environment variable|tolokers"
    ):
        script.main(["--data", "tolokers", *FEW, "--lines", "mlp", "--out", str(data)])


def test_labels_of_training_nodes_alone_are_shown(script):
    labels = np.array([0, 1, 1, 0])
    seen = script.with_labels(np.ones((4, 3), np.float32), labels, np.array([0, 2]))
    assert seen[:, 3:].tolist() == [[1, 0], [0, 0], [0, 1], [0, 0]]


def test_no_label_is_asked_for_that_is_shown(script):
    """A model that repeats the labels in its features gets every shown one right and
    knows nothing of the others; the loss is that of these, log 2.
    """
    rng = np.random.default_rng(0)
    labels, train = rng.integers(0, 2, 50), np.arange(0, 50, 2)
    features = script.with_labels(np.ones((50, 3), np.float32), labels, train)
    batch = script.Batch(*map(script.jnp.asarray, (features, 0, train, labels[train])))
    repeats = lambda features, edges, rngs: 100 * features[:, -2:]
    for seed in range(5):
        loss = script.completion_loss(repeats, batch, script.jax.random.key(seed))[0]
        assert np.isclose(loss, np.log(2))


def test_a_half_without_anomalous_nodes_has_a_loss(script):
    labels, train = np.eye(1, 20, dtype=int)[0], np.arange(20)
    features = script.with_labels(np.ones((20, 3), np.float32), labels, train)
    batch = script.Batch(*map(script.jnp.asarray, (features, 0, train, labels)))
    constant = lambda features, edges, rngs: script.jnp.zeros((20, 2))
    losses = [
        script.completion_loss(constant, batch, script.jax.random.key(seed))[0]
        for seed in range(10)
    ]
    assert np.allclose(losses, np.log(2))


def test_a_mean_over_starts_has_the_setting_of_its_line(data, script):
    few = ["--data", "digits-knn", *FEW, "--out", str(data), "--trials", "1"]
    lines = ["bwgnn-2hop-labels", "bwgnn-2hop-labels-mean"]
    script.main([*few, "--lines", *lines])
    one, mean = (rows(data)[f"digits-knn-0.4-{line}"] for line in lines)
    assert mean["config"] == one["config"] and not mean["trials"]
    scores = lambda row: [run["test"] for run in row["runs"]]
    assert scores(one) != scores(mean) and len(mean["runs"]) == 2


def test_the_choice_looks_at_validation_alone(script):
    run = lambda v, t: {
        "validation": {"macro_f1": v, "auroc": v},
        "test": {"macro_f1": t, "auroc": t},
    }
    assert (
        script.merit(run(0.7, 0.1))
        == script.merit(run(0.7, 0.9))
        < script.merit(run(0.8, 0.1))
    )


def test_more_trials_begin_with_the_same_ones(script):
    for space in script.SPACES.values():
        few = script.draws(space, script.BATCH)
        many = script.draws(space, 3 * script.BATCH)
        assert (
            many[: script.BATCH] == few
            and len({json.dumps(point) for point in many}) == 3 * script.BATCH
        )
    assert len(script.draws(script.SPACES["forest"], 1000)) == 36


def test_runs_of_a_setting_that_was_overtaken_are_not_kept(data, script, monkeypatch):
    "More trials may find a better setting: its runs take the place of the old one's."
    monkeypatch.setattr(
        script,
        "evaluate",
        lambda data, ratio, line, config, seed, epochs, starts: {
            "seed": seed,
            "seconds": 0.0,
            **{
                part: {"macro_f1": config["lr"], "auroc": config["lr"]}
                for part in ("validation", "test")
            },
        },
    )
    line = [
        "--data",
        "digits-knn",
        "--ratios",
        "0.4",
        "--lines",
        "mlp",
        "--seeds",
        "2",
        "--out",
        str(data),
    ]
    for trials in (1, 16):
        script.main([*line, "--trials", str(trials)])
        (row,) = rows(data).values()
        best = max(run["config"]["lr"] for run in row["trials"])
        assert (
            len(row["trials"]) == trials
            and [run["config"]["lr"] for run in row["runs"]] == [best] * 2
            and row["config"]["lr"] == best
        )


def test_changes_that_lost_are_built_here(script):
    "Positions start at nothing and are learned; β starts elsewhere, or is fixed."
    from et_nbdev.graph.anomaly import AnomalyEnergyTransformer

    graph = script.graph_of("digits-knn")
    y, edges = script.scaled(graph), AnomalyEnergyTransformer.prepare(graph)
    sizes = dict(dim=8, num_heads=2, head_dim=4, num_memories=8, hidden=8)
    build = lambda **more: script.transformer(y, sizes | more, len(y), 1, 0)
    plain, placed = build(), build(positions=True)
    assert np.array_equal(placed(y, edges), plain(y, edges))
    slope = script.nnx.grad(lambda model: model(y, edges).sum())(placed)
    assert np.abs(slope.positions[...]).max() > 0
    beta = lambda **more: np.asarray(build(**more).blocks[0].attention.beta)
    np.testing.assert_allclose(beta(), [0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(beta(beta=1.0), [1, 1], rtol=1e-6)
    fixed = build(learn_beta=False).blocks[0].attention
    assert fixed.beta[0] == 0.5 and not hasattr(fixed, "log_beta")
