"""Hand what settings.ini says to setuptools; nothing is stated twice."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).resolve().parent
config = ConfigParser()
config.read_string((root / "settings.ini").read_text(encoding="utf-8"))
cfg = config["DEFAULT"]
readme = root / "README.md"


def absolute(text):
    "Links into the repository, as they work where the package is listed."
    at = f"{cfg['git_url'].rstrip('/')}/%s/{cfg['branch']}/"
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{at % 'raw'}", text)
    return re.sub(r"(?<!!)(\[[^\]]*\]\()(?!https?:|#)", rf"\1{at % 'blob'}", text)


pythons = cfg["pythons"].split()
major, minor = map(int, pythons[-1].split("."))
demo, images, graphs, dgl, dev, check = (
    cfg[f"{extra}_requirements"].split()
    for extra in "demo images graphs dgl dev check".split()
)
images = demo + images

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(
        absolute(readme.read_text(encoding="utf-8"))
        if readme.exists()
        else cfg["description"]
    ),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    keywords=cfg["keywords"].split(),
    license={"apache2": "Apache-2.0"}[cfg["license"]],
    license_files=["LICENSE"],
    url=cfg["git_url"],
    project_urls={
        "Documentation": cfg["doc_host"] + cfg["doc_baseurl"],
        "Changelog": f"{cfg['git_url']}/blob/{cfg['branch']}/CHANGELOG.md",
    },
    packages=find_packages(include=[cfg["lib_path"], f"{cfg['lib_path']}.*"]),
    package_data={
        "et_nbdev": ["explorer/*.css", "explorer/*.js", "weights/*.safetensors"],
        "et_nbdev.vision": ["weights/*.safetensors"],
    },
    python_requires=f">={pythons[0]},<{major}.{minor + 1}",
    classifiers=[f"Programming Language :: Python :: {v}" for v in pythons],
    install_requires=cfg["requirements"].split(),
    extras_require={
        "demo": demo,
        "images": images,
        "graphs": graphs,
        "dgl": dgl,
        "dev": dev + images + graphs,
        "check": check,
    },
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        # lets other nbdev projects link to these docs
        "nbdev": [f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"],
    },
    zip_safe=False,
)
