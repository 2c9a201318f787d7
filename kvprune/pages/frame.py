"""What all pages share: one HTML file that is complete without a network, and in which nothing else can run.

A page is a template of its own within `frame.html`, with `shared.css` and the styles and scripts of its kind. Its
content security policy has the hashes of that one style and that one script, so whatever text the data holds, nothing
but them runs. All text is escaped where it is put in, and what is not seen by itself is shown as a sign.
"""

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvprune.errors import KvpruneError
from kvprune.pages.words import figure, seen, share, whole
from kvprune.terminal import finite

MARK = '<meta name="generator" content="kvprune">'  # by which a page is known
START = 1024  # bytes of a file that tell what wrote it
UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")  # in JSON inside HTML inside UTF-8
HERE = "kvprune.pages"


@dataclass(frozen=True)
class Kind:
    """The files that pages of a kind are made of: a package's template, style and scripts."""

    package: str
    template: str
    style: str
    scripts: tuple[str, ...]


def render(kind: Kind, **values: Any) -> str:
    """The whole HTML file of a kind, with `values` in its template; equal values give equal bytes."""
    style = _part(HERE, "shared.css") + _part(kind.package, kind.style)
    script = "".join(_part(kind.package, name) for name in kind.scripts)
    frame = {"policy": Markup(_policy(style, script)), "style": Markup(style), "script": Markup(script)}
    return _environment(kind.package).get_template(kind.template).render(**frame, **values)


def embedded(data: Any) -> Markup:
    """Data as JSON that can stand in a `<script>` element of a UTF-8 file; numbers that JSON lacks become null."""
    text = json.dumps(finite(data), ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return Markup(UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def check_target(path: Path, mark: str = MARK, verb: str = "kvprune") -> None:
    """Refuse, by KvpruneError, to write over what is no file of the same kind: those have `mark` near their start."""
    if not path.parent.is_dir():
        raise KvpruneError(f"{path}: there is no folder {path.parent}")
    if not path.exists():
        return
    if path.is_file():
        with path.open("rb") as file:
            if mark.encode() in file.read(START):
                return
    raise KvpruneError(f"{path}: exists and was not written by {verb}; use another name")


@cache
def _environment(package: str) -> Environment:
    loader = ChoiceLoader([PackageLoader(package, "."), PackageLoader(HERE, ".")])
    made = Environment(
        loader=loader, autoescape=True, finalize=_put, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters |= {"figure": figure, "share": share, "whole": whole}
    return made


def _put(value: Any) -> Any:
    """What stands in a page for a value: text with every character to be seen; markup and numbers as they are."""
    return seen(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _part(package: str, name: str) -> str:
    """The text of a file that lies in a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """A content security policy under which just this style and this script work, and nothing is fetched."""
    return (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _source(text: str) -> str:
    """How a policy names an inline style or script: by the hash of its text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
