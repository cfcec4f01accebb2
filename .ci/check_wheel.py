"""What a wheel holds, and what a package index will show of it. Run where it is installed."""

import re
import sys
import zipfile
from importlib.metadata import version

import jaxtrain_kernels

import jaxtrain

names = zipfile.ZipFile(sys.argv[1]).namelist()
metadata = next(name for name in names if name.endswith("METADATA"))
page = zipfile.ZipFile(sys.argv[1]).read(metadata).decode()

assert {"jaxtrain/py.typed", "jaxtrain_kernels/py.typed"} <= set(names)
assert "jaxtrain/configs/quickstart.yaml" in names
page_files = {f"jaxtrain/runs/page/static/{name}" for name in ("index.html", "uplot-LICENSE")}
assert page_files <= set(names), "the page is not whole"
assert "jaxtrain/configs/not_shipped.yaml" not in names, "a user's own config got into the wheel"
assert not [name for name in names if name.startswith(("tests/", "runs/", "benchmarks/"))]
relative = re.findall(r"\]\((?!https?:|#)[^)]*\)", page)
assert not relative, f"links that lead nowhere outside the repository: {relative}"
for field in (
    "Author",
    "Project-URL: Homepage",
    "Classifier: Typing :: Typed",
    "License-Expression",
):
    assert f"\n{field}" in page, f"{field} is missing from the wheel's metadata"
for module in (jaxtrain, jaxtrain_kernels):
    assert "site-packages" in (module.__file__ or ""), f"{module.__name__} is the checkout's"
print(f"wheel: {len(names)} files, jax {version('jax')}")
