"""Prints the lowest versions that pyproject.toml admits, as constraints for pip."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
groups = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
del groups["dev"]  # tools, of which nobody needs an old one
for requirement in (requirement for group in groups.values() for requirement in group):
    if requirement.startswith(project["name"]):  # extras of extras
        continue
    bounded = re.fullmatch(r"([\w.-]+)>=([\w.]+)(,.*)?", requirement)
    if not bounded:
        raise SystemExit(f"pyproject.toml: expected name>=version, got {requirement!r}")
    print("{}=={}".format(*bounded.groups()))
