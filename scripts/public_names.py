"""The names that users may rely on, one a line: `python scripts/public_names.py >
tests/public_names.txt` where the change is meant.
"""

import ast
import re
from pathlib import Path

LIB = Path(__file__).resolve().parent.parent / "et_nbdev"


def names():
    "module.name for every name in a public module's `__all__`, sorted."
    found = []
    for path in LIB.rglob("[!_]*.py"):
        module = ".".join(path.relative_to(LIB.parent).with_suffix("").parts)
        listed = re.search(r"(?s)^__all__ = (\[.*?\])", path.read_text("utf-8"), re.M)
        names = ast.literal_eval(listed[1]) if listed else []
        found += [f"{module}.{name}" for name in names]
    return sorted(found)


if __name__ == "__main__":
    print("\n".join(names()))
