"""Keep what notebook 40 needs of the data, so that it runs without: the labels of every
set, and a classifier's test molecules as the model sees them.

et_train_graphs --data MUTAG --out results/graph-classification/mutag-classifier
python experiments/classification_molecules.py
"""

import json
from pathlib import Path

import numpy as np
from runs import RESULTS, options

from et_nbdev.graph.classify import load_classifier
from et_nbdev.graph.crossval import deal, parts
from et_nbdev.graph.sets import Supply, laplacian_positions, learn_encoding, load_graphs
from et_nbdev.training import atomic_write

OUT = RESULTS / "graph-classification"


def main():
    parser, told = options(__doc__), "folder of a finished et_train_graphs"
    default = OUT / "mutag-classifier"
    parser.add_argument("--run", type=Path, default=default, help=told)
    args = parser.parse_args()
    folds = json.loads((OUT / "folds.json").read_text())
    names = [key.removesuffix("/10") for key in folds if key.endswith("/10")]
    labels = {name: "".join(map(str, load_graphs(name).labels)) for name in names}
    with atomic_write(OUT / "labels.json") as path:
        path.write_text(json.dumps(labels, indent=0) + "\n")
    config = json.loads((args.run / "metrics.json").read_text())["config"]
    model = load_classifier(args.run / "best.safetensors")
    graphs = load_graphs(config["data"])
    fold = parts(deal(graphs.labels), config["fold"])
    ids = np.sort(fold.test)
    encoding, k = learn_encoding(graphs, fold.train), config["model"]["num_positions"]
    positions = laplacian_positions(graphs, k)
    batch = Supply(graphs, encoding, positions, len(ids)).load(ids)
    arrays = {key: np.asarray(value) for key, value in batch._asdict().items()}
    arrays |= dict(ids=ids, logits=np.asarray(model(batch)))
    with atomic_write(args.run / "molecules.npz") as path, open(path, "wb") as f:
        np.savez_compressed(f, **arrays)
    print(f"{', '.join(names)}: labels; {len(ids)} molecules of {args.run}")


if __name__ == "__main__":
    main()
