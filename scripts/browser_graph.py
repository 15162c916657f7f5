"""What the page that walks through a graph in a browser loads, into nbs/play:
digits-graph.safetensors, the graph `digits-knn` and the detector that the chapter of the
explorer trains on it, half a minute.

    python scripts/browser_graph.py
"""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from flax import nnx

from et_nbdev.graph.anomaly import train_anomaly
from et_nbdev.graph.data import load_graph
from et_nbdev.graph.detector import CONFIGS
from et_nbdev.training import save_checkpoint

OUT = Path(__file__).resolve().parent.parent / "nbs/play/digits-graph.safetensors"


def graph_arrays(graph):
    """The senders of the edges into each node one after the other, where those of a node
    start, and what belongs to nodes: label, pixels, and the statistics of its features.
    """
    order = np.lexsort((graph.senders, graph.receivers))
    start = np.concatenate([[0], np.cumsum(graph.degrees)])
    y = np.column_stack([graph.features, np.log1p(graph.degrees)]).astype(np.float64)
    std = np.where(y.max(0) > y.min(0), y.std(0), 1)  # a constant column becomes 0
    return {
        "start": start.astype(np.uint16),
        "senders": graph.senders[order].astype(np.uint16),
        "labels": graph.labels.astype(np.uint8),
        "pixels": graph.features.astype(np.uint8),  # levels from 0 to 16
        "mean": y.mean(0).astype(np.float32),
        "std": std.astype(np.float32),
    }


def main():
    graph, config = load_graph("digits-knn"), CONFIGS["digits-knn"]
    config = replace(config, optim=replace(config.optim, steps=40))
    model = train_anomaly(config, graph, progress=False).model
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    about = {"config": {"model": asdict(config.model)}}
    save_checkpoint(OUT, {"params": params, "graph": graph_arrays(graph)}, about)
    print(OUT.name, OUT.stat().st_size // 1000, "kB")


if __name__ == "__main__":
    main()
