"""Stage the notebooks for the site in _proc/, as nbdev_docs does before it calls Quarto: errors in them show here."""
import json
import os
from pathlib import Path


def main():
    from nbdev.doclinks import _build_modidx
    from nbdev.quarto import refresh_quarto_yml
    from nbdev.serve import proc_nbs

    root = Path(__file__).resolve().parent.parent
    if any(part.startswith(".") for part in root.parts):
        raise SystemExit(f"nbdev stages nothing below a folder whose name begins with a dot: {root}")
    os.chdir(root)
    refresh_quarto_yml()
    _build_modidx()
    staged = proc_nbs(force=True)
    for path in sorted((root / "nbs").glob("*.ipynb")):
        copy = staged / path.name
        if not copy.exists() or not json.loads(copy.read_text(encoding="utf-8"))["cells"]:
            raise SystemExit(f"{path.name} was not staged")
        print("staged", path.name)


if __name__ == "__main__":  # nbdev starts worker processes that import this file again
    main()
