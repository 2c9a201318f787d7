"""One HTML file that shows what `kvprune inspect` found: searchable, and complete without a network.

The page is `page.html` with `page.css`, `page_parts.js`, `page.js` and the data put in. Its content security policy has
the hashes of that one style and that one script, so nothing else in the file can run, whatever text the data holds. The
data lie in a JSON block in which no `<` is left; the script puts all text in as text, never as markup.

Every part of the data may be missing or empty: its section is then left out. What pruning removed is read as

    "removed": {"text": [names], "loss": {"dense": nats, "slim": nats},
                "slots": [id of one of the "slots", or a slot as there],
                "tokens": [{"before", "token", "after", "document", "offset", "dense": nats, "slim": nats,
                            "slots": [{"id", or "ffn" and "slot", "contribution"}]}]}
"""

import base64
import hashlib
import html
import json
import math
import re
from importlib import resources
from string import Template
from typing import Any

MARK = '<meta name="generator" content="kvprune">'  # by which a page is known
UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")  # in JSON inside HTML inside UTF-8


def page(data: dict[str, Any]) -> str:
    """The whole HTML file for the data of an inspection; equal data give equal bytes."""
    style, script = _part("page.css"), _part("page_parts.js") + _part("page.js")
    return Template(_part("page.html")).substitute(
        policy=_policy(style, script), title=_title(data), style=style, data=embedded(data), script=script
    )


def embedded(data: Any) -> str:
    """Data as JSON that can stand in a `<script>` element of a UTF-8 file; numbers that JSON lacks become null."""
    text = json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _part(name: str) -> str:
    """A file that lies beside this module."""
    return resources.files("kvprune.reading").joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """A content security policy under which just this style and this script work, and nothing is fetched."""
    return (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _source(text: str) -> str:
    """How a policy names an inline style or script: by the hash of its text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _title(data: dict[str, Any]) -> str:
    """The text of `<title>`, escaped."""
    title = (data.get("model") or {}).get("title") or "model"
    return html.escape(f"{title} · kvprune inspect".encode(errors="replace").decode())


def _finite(value: Any) -> Any:
    """The same data with null for infinities and NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
