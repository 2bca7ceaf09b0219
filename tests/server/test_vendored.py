"""The page's libraries are the files that their authors published, and small."""

import hashlib
import re
import tomllib
from pathlib import Path

import onebox.server

VENDOR = Path(onebox.server.__file__).parent / "static" / "vendor"
LIBRARIES = tomllib.loads((VENDOR / "vendored.toml").read_text())["library"]
AXE = Path(__file__).parent / "axe-4.14.0"


def test_every_vendored_file_is_listed_with_its_sum():
    listed = {f"{each['folder']}/{name}": digest for each in LIBRARIES for name, digest in each["sha256"].items()}
    there = [path for path in VENDOR.rglob("*") if path.is_file() and path.name != "vendored.toml"]
    assert {str(path.relative_to(VENDOR)): hashlib.sha256(path.read_bytes()).hexdigest() for path in there} == listed


def test_every_library_has_its_version_and_its_licence():
    for each in LIBRARIES:
        assert each["folder"].endswith(f"-{each['version']}")
        assert "LICENSE.txt" in each["sha256"]
        assert each["integrity"].startswith("sha512-")


def test_the_page_names_no_folder_that_is_not_there():
    named = re.findall(r'"\./(vendor/[^"]+)"', (VENDOR.parent / "libraries.js").read_text())
    assert len(named) > 10
    assert [name for name in named if not (VENDOR.parent / name).is_file()] == []


def test_all_of_them_together_are_under_a_megabyte():
    assert sum(path.stat().st_size for path in VENDOR.rglob("*") if path.is_file()) < 1_000_000


def test_the_accessibility_checker_is_its_authors_file():
    """axe-core 4.14.0, `axe.min.js` of the npm package; only tests use it."""
    digest = hashlib.sha256((AXE / "axe.min.js").read_bytes()).hexdigest()
    assert digest == "20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878"
    assert (AXE / "LICENSE.txt").exists()
