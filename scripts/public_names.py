"""The names that users may rely on, one a line: `python scripts/public_names.py >
tests/public_names.txt` where the change is meant.
"""

import ast
from pathlib import Path

LIB = Path(__file__).resolve().parent.parent / "et_nbdev"


def names():
    "module.name for every name in a public module's `__all__`, sorted."
    found = []
    for path in LIB.rglob("[!_]*.py"):
        module = ".".join(path.relative_to(LIB.parent).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if (
                isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == "__all__"
            ):
                found += [f"{module}.{name}" for name in ast.literal_eval(node.value)]
    return sorted(found)


if __name__ == "__main__":
    print("\n".join(names()))
