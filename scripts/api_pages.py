"""The reference: every public name with its signature as it is written, what it is,
and where it is derived; a page for each room of the library, and one that lists all.
"""

import ast
import re

import modules as book

# Each room, what its page is called, and what it is for. A module belongs to the room
# of its name or of its folder.
ROOMS = {
    "block": ("The block", "A norm, terms that are energies, and their sum."),
    "dynamics": ("Dynamics", "The descent: solvers, where it settles, and noise."),
    "hopfield": ("Hopfield networks", "Where the block comes from."),
    "training": ("Training", "One loop for every task, and what happens beside it."),
    "vision": ("Pictures", "Data, models and training for pictures."),
    "graph": ("Graphs", "Attention along edges, odd nodes and whole graphs."),
    "puzzle": ("Puzzles", "Boards, a model that fills them in, and its descent."),
    "testing": ("Testing", "Is this gradient right, and does this descend?"),
    "explore": ("Explorer", "A descent to play with, in a notebook."),
}
BY_MODULE = dict.fromkeys("norm energy attention memory block".split(), "block")
BY_MODULE |= {"commands": "training"}
BY_MODULE |= dict.fromkeys("dynamics solvers equilibria".split(), "dynamics")

# What a signature does without: decorators that change nothing for whoever calls, and
# what the table of arguments holds.
IDLE = re.compile(r"^ *@(?!dataclass|staticmethod|classmethod|property).*\n", re.M)
BESIDE = re.compile(r"^ +# .*\n|  # .*$", re.M)
OPTION = r"\boption\(\s*((?:[^,()]|\([^()]*\))+),.*?\)(?=\n+    \S|\Z)"
OPTION = re.compile(OPTION, re.S)

# What an argument is where neither a comment nor a sentence of the docstring tells.
LETTERS = "".join(book.notebook_cells("glossary.ipynb")[1]["source"])
SAME = dict(re.findall(r"\| `(\w+)` \| ([^|\n]+?) \|", LETTERS))


def escaped(text):
    "Text for a cell of a table."
    marks = "|" if re.search("[`$]", text) else r"|<>\[\]"
    return re.sub(f"([{marks}])", r"\\\1", text)


def what(node, comment=""):
    return escaped(book.first_line(node) if isinstance(node, book.DEFINED) else comment)


def arguments(a):
    "The names of arguments, with stars, and what stands in the source."
    stars = {a.vararg: "*", a.kwarg: "**"}
    found = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
    found = [p for p in found if p and p.arg not in ("self", "cls")]
    return [(stars.get(p, "") + p.arg, p) for p in found]


def called(method):
    "How a method is called: its name and the names of its arguments."
    if any(ast.unparse(d) == "property" for d in method.decorator_list):
        return method.name
    return f"{method.name}({', '.join(name for name, _ in arguments(method.args))})"


def takes(module, node):
    """(argument, what it is) of a function, of what makes a class, or of the fields of
    one, with those of its parents in the module.
    """
    said = (ast.get_docstring(node) or "").partition("Raises ")[0]
    said = re.split(r"\n\n|\n- |(?<=\.)\s+(?=[A-Z`$])|;\s+(?=`)", said)
    made = [p for p in node.body if getattr(p, "name", "") == "__init__"] or [node]
    if a := getattr(made[0], "args", None):
        found = arguments(a)
    else:
        bases = [ast.unparse(base) for base in node.bases]
        for base in module.defined.keys() & bases:
            yield from takes(module, module.defined[base][0])
        fields = node.body if node.decorator_list or "NamedTuple" in bases else ()
        found = [(p.target.id, p) for p in fields if isinstance(p, ast.AnnAssign)]
    for name, part in found:
        option = re.search(r"= option\(.+?, f?(['\"])(.*)\1\)$", ast.unparse(part))
        named = (s for s in said if re.search(rf"`{name.strip('*')}(?![\w.])", s))
        told = option and re.sub(r"^{.*?}", "a known name", option[2])
        told = [book.comment_of(module.lines, part), told]
        told += [*sorted(named, key=lambda s: s[0] != "`"), SAME.get(name, "")]
        yield f"`{name}`", escaped(" ".join(next(filter(None, told), "").split()))


def listing(left, right, rows):
    "A table whose rows stand below each other on a phone."
    rows = [f"| {a} | {b} |" for a, b in [(left, right), ("---", "---"), *rows]]
    return "\n".join(["::: {.api-list}", *rows, ":::"])


def anchor_of(module, name):
    "On the page of its room; with a number where only its capitals are its own."
    return name + "-1" * (module.anchor(name) == f"{name.lower()}-1")


def entry(module, name, offered):
    """A name on the page of its room: where it is, how it is called, what it is. Its
    heading is one of a section, since these are what the search finds by their names.
    """
    node, comment = module.public[name]
    chapter, anchor = module.place([name])
    title = re.match(r"# (.+)", book.notebook_cells(chapter)[0]["source"][0])[1]
    at = f"{book.on_site(chapter)}#{anchor}".rstrip("#")
    home = "et_nbdev" if name in offered else module.name
    parts = [
        f"## {name} {{#{anchor_of(module, name)}}}",
        f"`from {home} import {name}` · [{title.strip()}]({at})"
        f" · [source]({module.source(name)})",
    ]
    if not isinstance(node, book.DEFINED):
        return "\n\n".join([*parts, escaped(comment)])
    said = (ast.get_docstring(node) or "").strip().split("\n\n")[0]
    code = BESIDE.sub("", OPTION.sub(r"\1", IDLE.sub("", module.signature(name))))
    parts += [f"```python\n{code}\n```", book.linked(said, chapter, "api")]
    methods = [
        (f"`{called(part)}`", what(part))
        for part in (node.body if isinstance(node, ast.ClassDef) else ())
        if isinstance(part, ast.FunctionDef) and part.name[0] != "_" and what(part)
    ]
    taken = list(takes(module, node))
    parts += [listing("argument", "what it is", taken)] * bool(taken)
    parts += [listing("method", "what it does", methods)] * bool(methods)
    return "\n\n".join(parts)


def front(title, description):
    # there is no such file in the repository that a reader could be sent to
    said = f'title: "{title}"\ndescription: "{description}"\nrepo-actions: false'
    return f"---\n{said}\ntoc-depth: 2\n---\n"


def offered_names():
    "What `import et_nbdev` offers."
    text = (book.ROOT / "et_nbdev/__init__.py").read_text(encoding="utf-8")
    return ast.literal_eval(re.search(r"(?s)^__all__ = (\[.*?\])", text, re.M)[1])


def api_pages():
    "{file: text} of the reference."
    offered = offered_names()
    rows, entries = {room: [] for room in ROOMS}, {room: [] for room in ROOMS}
    for module in book.modules():
        if module.path.name.startswith("_"):
            continue
        own = module.name.split(".")[1]
        room = BY_MODULE.get(own, own)
        for name, defined in module.public.items():
            link = f"[`{name}`](api_{room}.qmd#{anchor_of(module, name)})"
            rows[room].append((link, what(*defined)))
            entries[room].append(entry(module, name, offered))
    pages = {
        "api.qmd": front("API", "Every public name of et_nbdev, room by room.")
        + f"\n`import et_nbdev` offers {len(offered)} of these names. The page of a room"
        " has signatures, and links to the chapters that derive them.\n"
    }
    for room, (title, purpose) in ROOMS.items():
        table = listing("name", "what it is", rows[room])
        pages["api.qmd"] += f"\n## [{title}](api_{room}.qmd)\n\n{purpose}\n\n{table}\n"
        top = front(f"API: {title[0].lower()}{title[1:]}", purpose)
        pages[f"api_{room}.qmd"] = "\n\n".join([top, *entries[room], ""])
    print(f"api.qmd lists {sum(map(len, rows.values()))} public names")
    return pages
