"Build cbatch from settings.ini, the one place that holds its version, requirements, addresses and commands."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=["="])
ini.read(here / "settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]
split = lambda k: cfg.get(k, "").split()
# every `x_requirements` key becomes the extra `x`: pip install cbatch[x]
extras = {k.removesuffix("_requirements"): split(k) for k in cfg if k.endswith("_requirements")}
# its tests run whatever the other extras bring
extras["dev"] += [r for k, rs in extras.items() if k != "dev" for r in rs]
minors = range(int(cfg["min_python"].split(".")[1]), 14)
status = {"3": "3 - Alpha", "4": "4 - Beta", "5": "5 - Production/Stable"}[cfg["status"]]
# pictures lie in the repository: elsewhere the text needs their whole address
raw = f"{cfg['git_url']}/raw/{cfg['branch']}"
readme = (here / "README.md").read_text(encoding="utf-8").replace("](assets/", f"]({raw}/assets/")

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme,
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    author=cfg["author"],
    url=cfg["git_url"],
    project_urls={"Documentation": cfg["doc_host"] + cfg["doc_baseurl"] + "/"},
    keywords=cfg["keywords"].split(),
    classifiers=[f"Development Status :: {status}", "Intended Audience :: Developers", "Framework :: Jupyter",
                 "Topic :: Scientific/Engineering :: Artificial Intelligence"]
    + [f"Programming Language :: Python :: 3.{m}" for m in minors],
    packages=find_packages(include=["cbatch", "cbatch.*"]),
    python_requires=f">={cfg['min_python']}",
    install_requires=split("requirements"),
    extras_require=extras,
    entry_points={"console_scripts": split("console_scripts"), "nbdev": ["cbatch=cbatch._modidx:d"]},
    zip_safe=False,
)
