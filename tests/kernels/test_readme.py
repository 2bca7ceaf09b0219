"""The page on kernels lists exactly the operations that there are."""

import re
from pathlib import Path

import onebox.kernels
from tests.kernels.catalogue import operations, packages


def test_the_table_lists_every_operation_under_its_folder():
    text = (Path(onebox.kernels.__file__).parent / "README.md").read_text()
    table = text.split("## Operations")[1].split("\n## ")[0]
    listed, folder = [], ""
    for cell in re.findall(r"^\| (\S+) \|", table, re.MULTILINE):
        if cell.startswith("**"):
            folder = cell.strip("*")
        elif cell.startswith("`"):
            listed.append((folder, cell.strip("`")))
    expected = [(operation.package.rpartition(".")[2], name) for name, operation in operations().items()]
    assert sorted(listed) == sorted(expected)
    assert {folder for folder, _ in listed} == {package.rpartition(".")[2] for package in packages()}
