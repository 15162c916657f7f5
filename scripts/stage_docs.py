"""Stage the notebooks for the site in _proc/, as nbdev_docs does before it calls
Quarto, and add what nbdev does not make: links to open and download each notebook, a
page that lists every public name, signatures that can be read.
"""

import ast
import json
import os
import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


# --- every public name ---


def first_line(node):
    "The beginning of a docstring, up to the first line that ends a sentence."
    said = []
    for line in (ast.get_docstring(node) or "").strip().split("\n\n")[0].split("\n"):
        said.append(line.strip())
        if line.rstrip().endswith((".", ":")):
            break
    return " ".join(said)


def comment_of(lines, node):
    "The comment at the end of an assignment's first line, or on the lines above it."
    beside = re.search(r"\s#\s+(.*)$", lines[node.lineno - 1])
    if beside:
        return beside[1]
    above = []
    for line in reversed(lines[: node.lineno - 1]):
        if not re.match(r"# (?!%%)", line):
            break
        above.insert(0, line[2:])
    return " ".join(above)


def definitions(path):
    "{name: (its definition, the comment of a constant)} of a module's top level."
    text = path.read_text(encoding="utf-8")
    lines, found = text.split("\n"), {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node, ""
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            comment = comment_of(lines, node)
            for target in (
                node.targets if isinstance(node, ast.Assign) else [node.target]
            ):
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        found[name.id] = node, comment
    return ast.parse(text), found


def section_of(cells, name):
    "The heading above the cell that assigns `name`."
    heading = ""
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = (re.findall(r"^##+ (.+)$", source, re.M) or [heading])[-1]
        elif re.search(r"^#\|\s*exports?\b", source, re.M) and re.search(
            rf"^(?:[\w, ]*\b)?{name}\b[\w, ]*(?::[^=\n]+)?=", source, re.M
        ):
            return heading
    return ""


def escaped(text):
    return (
        re.sub(r"([|<>\[\]])", r"\\\1", text)
        if "`" not in text and "$" not in text
        else text.replace("|", "\\|")
    )


def api_page(identifier):
    """Every public name with the first line of what its documentation says, linked to
    the place where it is explained.
    """
    parts = [
        "---\ntitle: API\ndescription: Every public name of et_nbdev, and where it is"
        " derived, documented and tested.\n---\n"
    ]
    count = 0
    modules = {}
    for path in (ROOT / "et_nbdev").rglob("*.py"):
        source = re.search(
            r"File to edit: .*?/nbs/(\S+\.ipynb)", path.read_text(encoding="utf-8")
        )
        if source:
            modules[source[1]] = path
    for notebook, path in sorted(modules.items()):
        tree, found = definitions(path)
        public = found["__all__"]
        cells = json.loads((ROOT / "nbs" / notebook).read_text(encoding="utf-8"))[
            "cells"
        ]
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        rows = []
        for name in ast.literal_eval(public[0].value):
            node, comment = found[name]
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                anchor, what = name.lower(), first_line(node)
            else:
                anchor, what = (
                    (
                        identifier(section_of(cells, name))
                        if section_of(cells, name)
                        else ""
                    ),
                    comment,
                )
            rows.append(
                f"| [`{name}`]({notebook}{'#' * bool(anchor)}{anchor}) |"
                f" {escaped(what)} |"
            )
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if (
                    isinstance(method, ast.FunctionDef)
                    and not method.name.startswith("_")
                    and first_line(method)
                ):
                    rows.append(
                        f"| [`.{method.name}`]({notebook}#{anchor}) |"
                        f" {escaped(first_line(method))} |"
                    )
            count += 1
        title = re.sub(r"^[0-9]+[a-z]?_", "", Path(notebook).stem).replace("_", " ")
        parts.append(
            f"## {module}\n\n{first_line(tree)} Notebook: [{title}]({notebook}).\n\n"
            "| name | what it is |\n|---|---|\n" + "\n".join(rows) + "\n"
        )
    print(f"api.qmd lists {count} public names")
    return "\n".join(parts)


# --- what nbdev staged ---


def readable(text):
    "A signature as it is written: Array, not where jaxlib keeps the class."
    return re.sub(
        r"\b(?:jaxlib\._jax\.|jaxtyping\.|collections\.abc\.|flax\.nnx\.(?:\w+\.)*)(?=[A-Z])",
        "",
        text,
    )


def fields(text, classes):
    """The signature of a named tuple or protocol, which Python gives as (*args,
    **kwargs): its fields, or none.
    """

    def spell(m):
        lines = [
            f"    {ast.unparse(f.target)}:"
            f" {ast.unparse(f.annotation)}{' = ' + ast.unparse(f.value) if f.value else ''},\n"
            for f in classes.get(m[1], ())
            if isinstance(f, ast.AnnAssign)
        ]
        return (
            f"def {m[1]}(\n{''.join(lines)}):"
            if lines
            else f"class {m[1]}"
            if m[1] in classes
            else m[0]
        )

    return re.sub(r"def (\w+)\(\n\s*\*args, \*\*kwargs\n\):", spell, text)


# What matplotlib's animations take from a font on another site.
SIGNS = {
    "minus": "−",
    "plus": "+",
    "fast-backward": "«",
    "step-backward": "‹",
    "play fa-flip-horizontal": "◀",
    "pause": "‖",
    "play": "▶",
    "step-forward": "›",
    "fast-forward": "»",
}


def self_contained(html, alt):
    """An animation of matplotlib without anything from another site, and with words for
    those who cannot see it.
    """
    html = re.sub(r"<link rel=\"stylesheet\"\s+href=\"https://maxcdn[^>]*>", "", html)
    html = re.sub(r"<i class=\"fa fa-([\w -]+)\"></i>", lambda m: SIGNS[m[1]], html)
    return html.replace("<img id=", f'<img alt="{escape(alt)}" id=')


def lines(source):
    """The lines of a cell's source with their ends. Quarto splits a source that is one
    string, and joins its lines again without their ends.
    """
    return "".join(source).splitlines(keepends=True)


def folded(source):
    "nbdev shows all exported source; what is longer than a screen opens at a click."
    return (
        source.replace("#| code-fold: show", "#| code-fold: true", 1)
        if source.count("\n") > 32
        else source
    )


def links(name, config):
    repo, home = (
        config.git_url.removeprefix("https://github.com/"),
        config.doc_host + config.doc_baseurl,
    )
    return (
        "::: {.page-links}\n[Open in"
        f" Colab](https://colab.research.google.com/github/{repo}/blob/{config.branch}/nbs/{name})"
        f" · [Download the notebook]({home}/notebooks/{name}) · [See it on"
        f" GitHub]({config.git_url}/blob/{config.branch}/nbs/{name})\n:::"
    )


def addressed(text, config):
    "Links to the repository and to its files outside nbs/ get its address."
    text = re.sub(r"^(\s*href: )\.\./(?=\s)", rf"\1{config.git_url}", text, flags=re.M)
    return text.replace("](../", f"]({config.git_url}/blob/{config.branch}/")


def finish(path, config, classes):
    """Links below the title; signatures; animations; addresses; and links to methods,
    which have no heading of their own, lead to their class.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    home = config.doc_host + config.doc_baseurl

    def repoint(text):
        text = addressed(text, config)
        return re.sub(rf"({re.escape(home)}/[\w-]+\.html#\w+)\.\w+", r"\1", text)

    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = repoint("".join(cell["source"]))
        else:
            cell["source"] = folded("".join(cell["source"]))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/markdown" in data:
                text = repoint("".join(data["text/markdown"]))
                data["text/markdown"] = (
                    readable(fields(text, classes))
                    if "show_doc(" in "".join(cell["source"])
                    else text
                )
            if "text/html" in data:
                alt = re.search(
                    r"^#\|\s*fig-alt:\s*[\"']?(.*?)[\"']?\s*$",
                    "".join(cell["source"]),
                    re.M,
                )
                data["text/html"] = self_contained(
                    "".join(data["text/html"]), alt[1] if alt else ""
                )
    if path.name[0].isdigit():
        notebook["cells"].insert(
            1,
            {
                "cell_type": "markdown",
                "id": "page-links",
                "metadata": {},
                "source": links(path.name, config),
            },
        )
    for cell in notebook["cells"]:
        cell["source"] = lines(cell["source"])
    path.write_text(
        json.dumps(notebook, indent=1, ensure_ascii=False), encoding="utf-8"
    )


def main():
    from nbdev.config import get_config
    from nbdev.doclinks import NbdevLookup, _build_modidx
    from nbdev.quarto import refresh_quarto_yml
    from nbdev.serve import proc_nbs

    if any(part.startswith(".") for part in ROOT.parts):
        raise SystemExit(
            f"nbdev stages nothing below a folder whose name begins with a dot: {ROOT}"
        )
    os.chdir(ROOT)
    refresh_quarto_yml()
    _build_modidx()
    if NbdevLookup().code("EnergyTransformer") is None:
        print(
            "et_nbdev is not installed (pip install -e .): names in the text are not"
            " linked, and signatures not to their source"
        )
    finish_all(proc_nbs(force=True), get_config())


def finish_all(staged, config):
    "Finish every page that nbdev staged, and add the list of names."
    from check_docs import identifier

    sources = sorted((ROOT / "nbs").glob("*.ipynb"))
    classes = {
        node.name: node.body
        for path in (ROOT / "et_nbdev").rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    for path in sources:
        copy = staged / path.name
        if (
            not copy.exists()
            or not json.loads(copy.read_text(encoding="utf-8"))["cells"]
        ):
            raise SystemExit(f"{path.name} was not staged")
        finish(copy, config, classes)
    site = staged / "_quarto.yml"
    site.write_text(
        addressed(site.read_text(encoding="utf-8"), config), encoding="utf-8"
    )
    (staged / "api.qmd").write_text(api_page(identifier), encoding="utf-8")
    print(f"{len(sources)} notebooks staged in {staged.name}/")


if __name__ == "__main__":  # nbdev starts worker processes that import this file again
    main()
