"""Two runs of experiments/ become what the library ships and its chapters draw: an
Energy Transformer as `from_pretrained("tiny-imagenet")`, and a transformer of as many
operations beside its results, for comparison. Both are named by the files of their
results, which have the weights beside them.

    python scripts/ship_model.py results/image-pair/NAME.json \\
        results/image-pair/RIVAL.json
    python experiments/image_figures.py       # then, what is drawn and measured from them
    python scripts/front_figures.py
    python scripts/browser_models.py
    python scripts/model_cards.py
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from et_nbdev.vision.model import load_model, save_model

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
SHIPPED = ROOT / "et_nbdev/vision/weights/tiny-imagenet.safetensors"
RIVAL = RESULTS / "tiny-imagenet-transformer"


def row_of(run: str) -> dict:
    "What is kept of a run, as `folder/name` below results/, with its `run`."
    return json.loads((RESULTS / f"{run}.json").read_text()) | {"run": run}


def chosen(file: Path):
    "The model of a run, and what the file of its weights says of the run."
    run = file.resolve().relative_to(RESULTS).with_suffix("").as_posix()
    row, kept = row_of(run), ("run", "seed", "commit", "validation_mse", "test_mse")
    print(f"{run}: test error {row['test_mse']:.4f}")
    meta = {key: row[key] for key in kept} | {"step": row["best_step"]}
    return load_model(RESULTS / f"{run}.safetensors"), meta


def main():
    run, rival = (Path(name) for name in sys.argv[1:])
    (model, about), (rival, theirs) = chosen(run), chosen(rival)
    kinds = type(model).__name__, type(rival).__name__
    if kinds != ("ImageEnergyTransformer", "ImageTransformer"):
        sys.exit(f"expected an Energy Transformer and a transformer, got {kinds}")
    save_model(SHIPPED, model, about)
    save_model(RIVAL / "model.safetensors", rival, theirs)
    config = json.dumps({**theirs, "model": asdict(rival.config)}, indent=2) + "\n"
    (RIVAL / "config.json").write_text(config)


if __name__ == "__main__":
    main()
