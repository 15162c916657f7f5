"""Does a split at random flatter a detector of fraud? On card transactions (S-FFSD, from
ET_DATA): split at random, and in time; each with what the detector reports.

    python experiments/looking_ahead.py      makes results/looking-ahead.json
"""

import os
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
from runs import keep, options

from et_nbdev.graph.anomaly import AnomalyConfig, AnomalyTraining
from et_nbdev.graph.data import Graph, from_relations, split
from et_nbdev.graph.detector import AnomalyDetector
from et_nbdev.training import OptimConfig

KINDS = "source", "target", "location", "type"  # what linked purchases share
CONFIG = AnomalyTraining(
    model=AnomalyConfig(dim=32, head_dim=32, num_memories=64, hidden=32),
    optim=OptimConfig(steps=40, warmup=5, lr=5e-3, lr_floor=0.0, weight_decay=0.05),
)


def transactions(count: int | None = None) -> tuple[Graph, np.ndarray]:
    "The first purchases, and the time of each; None: all."
    file = np.load(Path(os.environ["ET_DATA"], "graphs/anomaly/transactions.npz"))
    features, labels, when = (file[k][:count] for k in ("features", "labels", "time"))
    ends = {k: [file[f"{k}_{end}"] for end in ("senders", "receivers")] for k in KINDS}
    ends = {k: np.array(of)[:, np.max(of, 0) < len(labels)] for k, of in ends.items()}
    return from_relations(ends, features, labels, "transactions"), when


def main():
    args = options(__doc__, "looking-ahead.json").parse_args()
    graph, moments = transactions()
    warnings.simplefilter("ignore")  # trees that win are a result here
    found = {}
    for name, when in {"at random": None, "ahead": moments}.items():
        began, parts = time.time(), split(graph, time=when)
        detector = AnomalyDetector(CONFIG).fit(graph, split=parts)
        shares = [float(graph.labels[ids].mean()) for ids in parts]
        scores = dict(test=detector.test_, report=detector.report_)
        seconds = round(time.time() - began, 1)
        found[name] = dict(anomalous=shares, **scores, seconds=seconds)
        print(name, found[name], flush=True)
    keep(args.out, dict(config=asdict(CONFIG), splits=found))


if __name__ == "__main__":
    main()
