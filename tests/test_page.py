"""The page of `kvprune inspect`: nothing in a model's text breaks out of it, and it works in a browser."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvprune.pages.frame import embedded
from kvprune.reading.page import page
from tests.browser import Browser, Parsed

SCRIPT = "</script><script>alert(1)</script>"
IMAGE = "<img src=x onerror=\"document.title='broken'\">"
MARKUP = [SCRIPT, IMAGE, "<!--<script>", "]]>", "&lt;b&gt;", "'\"`${1}$policy"]
HOSTILE = [*MARKUP, "\u2028\u2029", "\ud800", "\x00\x1b[31m"]
BLANK = [" the", "\n", "\t\t", "    ", "\u00a0", "\u200b", "\x07", "\ufffd", ""]
TOKENS = [*BLANK, " שלום", " كتاب", "\u0301", "東京", *HOSTILE]
Show = Callable[..., Browser]


def trigger(at: int) -> dict[str, Any]:
    """An occurrence of one of the tokens."""
    text = TOKENS[at % len(TOKENS)]
    document = text if at % 2 else "corpus/a_rather_long_name_of_a_text_file.txt, row 12"
    before = "שלום עולם " * 5 if at % 2 else "x = {\n    'a' " * 8
    size = {"coefficient": (-1) ** at * (9.5 - at / 2), "contribution": 3.25}
    return {**size, "document": document, "offset": 1000 * at, "before": before, "token": text, "after": " and so on"}


def one_slot(layer: int, slot: int) -> dict[str, Any]:
    """A slot as the inspection describes it."""
    name = {"id": f"{layer}:{slot}", "ffn": f"model.layers.{layer}.mlp", "slot": slot, "removed": slot > 15}
    shared = {"kind": "bigram", "text": f" only{slot} <b>", "share": 0.85, "chance": 0.00012}
    logits = [(TOKENS[(slot + at) % len(TOKENS)], 100 + at, 8.5 - at) for at in range(10)]
    promoted = [[text, token, logit] for text, token, logit in logits]
    value = {"promoted": promoted, "suppressed": [[text, token, -logit] for text, token, logit in logits]}
    triggers = [trigger(slot + at) for at in range(4)]
    return {**name, "rate": 0.4 / (slot + 1) ** 2, "triggers": triggers, "shared": shared, **value, "coherence": 0.31}


def one_ffn(layer: int) -> dict[str, Any]:
    """How the slots of a layer fire."""
    rates = {"edges": [0, 1e-4, 1e-3, 1e-2, 1e-1, 1], "slots": [3, 40, 1000, 400, 93]}
    ranked = [[rank, 0.6 / rank ** (1 + layer / 50)] for rank in (1, 2, 4, 9, 30, 100, 400, 1536)]
    over = {"over_peak": 0.121, "over_rms": {"0.5": 0.52, "1": 0.27, "2": 0.052, "4": 0.0061}}
    rare = {"rare_1000": 0.21, "rare_10000": 0.0021, "gini": 0.81, "effective": 310.4}
    size = {"name": f"model.layers.{layer}.mlp", "experts": 0, "width": 1536, "tokens": 65536}
    return {**size, **over, "rates": rates, "ranked": ranked, **rare}


def sample(layers: int = 4, width: int = 24) -> dict[str, Any]:
    """All that an inspection of a small model with hostile texts could find."""
    names = [{"name": f"model.layers.{layer}.mlp"} for layer in range(layers)]
    coherence = {"mean": 0.19, "null_mean": 0.08, "null_p95": 0.12, "above_p95": 0.66}
    lens = {"slot_top": 0.01, "ffn_top": 0.1, "residual_top": 0.2, "kl": 5.1, "key_next": 0.02, "chance": 1e-6}
    gone = [f"3:{slot}" for slot in range(16, width)]
    writers = [{"id": "3:17", "contribution": 4.5}, {"ffn": "model.layers.3.mlp", "slot": 18}, {"ffn": "b", "slot": 1}]
    worst = {**trigger(3), "dense": 1.25, "slim": 7.5, "slots": writers}
    loss = {"text": "wikitext", "loss": {"dense": 3.1, "slim": 3.5}}
    return {
        "format": "kvprune.inspect",
        "version": 1,
        "model": {"title": f"SmolLM2 {SCRIPT}", "commit": "0123456789abcdef", "note": f"dequantised {IMAGE}"},
        "run": "runs/quickstart",
        "text": ["wikitext", "builtin:self"],
        "tokens": 65536,
        "firing": [one_ffn(layer) for layer in range(layers)],
        "slots": [one_slot(layer, slot) for layer in range(layers) for slot in range(width)],
        "coherence": [{**name, **coherence} for name in names],
        "lens": [{**name, **lens} for name in names],
        "removed": {**loss, "slots": [*gone, "9:9"], "tokens": [worst, trigger(4)]},
    }


def test_hostile_text_stays_data() -> None:
    parsed = Parsed(page(sample()).encode().decode())  # a lone surrogate would not go into a file
    assert json.loads(parsed.texts["script"][0]) == sample()
    assert "alert" not in parsed.texts["script"][1]
    assert parsed.texts["title"][0] == f"SmolLM2 {SCRIPT} · kvprune inspect"
    drawn = re.compile("<figure.*?</figure>", re.DOTALL)
    bare, empty = (Parsed(drawn.sub("", page(data))).elements for data in (sample(), {}))
    assert bare == empty  # so that none comes from the data


def test_names_in_plots_are_told_as_text() -> None:
    data = sample(layers=2)
    data["firing"][0]["name"] = f"{SCRIPT}$x^2$\x00\ud800"
    parsed = Parsed(page(data).encode().decode())
    assert f"{SCRIPT}$x^2$‹U+0000›‹U+D800›" in parsed.texts["title"]
    assert [tag for tag, _ in parsed.elements].count("script") == 2


@pytest.mark.parametrize("text", HOSTILE)
def test_embedded_text_comes_back(text: str) -> None:
    written = embedded({text: [text]})
    assert json.loads(written) == {text: [text]}
    assert not set(written) & set("<>&\u2028\u2029\ud800")


def test_numbers_that_json_lacks_are_null() -> None:
    assert json.loads(embedded({"a": (math.nan, [math.inf, 1.5])})) == {"a": [None, [None, 1.5]]}


def test_only_its_own_style_and_script_may_run() -> None:
    text = page(sample())
    parsed = Parsed(text)
    policy = next(each["content"] for tag, each in parsed.elements if tag == "meta" and "http-equiv" in each) or ""
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for kind, content in (("script", parsed.texts["script"][1]), ("style", parsed.texts["style"][0])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    attributes = [(name, value) for _, each in parsed.elements for name, value in each.items()]
    assert not [name for name, _ in attributes if name.startswith("on") or name in {"style", "src", "action"}]
    assert all(str(value).startswith(("#", "data:")) for name, value in attributes if name == "href")
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|fetch|import)\b", text)
    assert not re.search("https?:", text)
    ids = [value for name, value in attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_same_data_same_bytes() -> None:
    data = sample()
    turned = dict(reversed(deepcopy(data).items()))
    assert page(data) == page(turned) == page(deepcopy(data))
    assert data == sample()


@pytest.fixture
def shown(browser: Browser, tmp_path: Path) -> Show:
    """Shows data in the browser."""
    browser.reset()

    def show(data: dict[str, Any], fragment: str = "") -> Browser:
        (tmp_path / "page.html").write_text(page(data), encoding="utf-8")
        browser.open((tmp_path / "page.html").as_uri() + fragment)
        return browser

    return show


def test_page_is_quiet_and_asks_for_nothing(shown: Show) -> None:
    tab = shown(sample())
    assert tab.complaints() == []
    asked = [told["request"]["url"].split(":")[0] for told in tab.told("Network.requestWillBeSent")]
    assert sorted(set(asked) | {"data"}) == ["data", "file"]
    assert asked.count("file") == 1
    assert tab.value("document.title") == f"SmolLM2 {SCRIPT} · kvprune inspect"
    assert tab.value("[all('script').length, all('img, iframe, [onerror], [style]').length]") == [2, 0]
    assert tab.texts("nav a") == ["Firing", "Slots", "Values", "Layer by layer", "What pruning forgets"]
    assert tab.texts("#removed-about")[0].startswith("9 removed slots")
    assert "1.25 → 7.50 nats (+6.25)" in tab.texts("#removed-tokens")[0]
    assert tab.texts("#removed-tokens .id") == ["3:17", "3:18", "b:1"]
    assert tab.texts("#removed-tokens a[href]") == ["3:17", "3:18"]


def test_address_opens_a_slot(shown: Show) -> None:
    tab = shown(sample(), "#slot=3:17")
    card = tab.texts("#card")[0]
    assert card.startswith("Slot 3:17FFNmodel.layers.3.mlpFires on0.12% of the tokensPlanremoved")
    assert "85.0% of them end with the bigram ␣only17␣<b>; by chance 0.012% would." in card
    assert "coefficient −1.00 · contribution 3.25 · " in card
    assert "character 18,000" in card
    assert tab.texts("#card mark") == ["&lt;b&gt;", "'\"`${1}$policy", "‹U+2028›‹U+2029›", "‹U+D800›"]
    promoted = tab.texts("#card .scroll:first-child tbody th")
    assert promoted[4:] == ["‹U+0000›‹U+001B›[31m", "␣the", "⏎", "⇥⇥", "␣␣␣␣", "⍽"]
    assert tab.texts("#card .scroll:last-child tbody td")[:2] == ["−8.50", "−7.50"]
    assert tab.value("document.activeElement.id") == "card"
    for asked, said in (("9:99", "Slot 9:99This slot is not among"), ("%", "Slot %This")):
        tab.value(f"location.hash = '#slot={asked}'")
        tab.until(f"all('#card')[0].textContent.startsWith('{said}')")
    assert tab.complaints() == []


def test_search_by_keyboard(shown: Show) -> None:
    tab = shown(sample())
    tab.search("3:1")
    tab.until("all('#card')[0].dataset.slot === '3:1'")
    assert tab.texts("#hits .id") == ["3:1", *(f"3:{slot}" for slot in range(10, 20))]
    assert tab.texts("#hits [aria-current] .id") == ["3:1"]
    for query in ("only7 <B>", "␣ONLY7␣"):
        tab.search(query)
        tab.until("all('#card')[0].dataset.slot === '0:7'")
        assert tab.texts("#hits .id") == [f"{layer}:7" for layer in range(4)]
        assert tab.texts("#found") == ["4 of 96 slots"]
    tab.search("no such token")
    assert tab.texts("#hits .id") == []
    assert tab.complaints() == []


def test_chosen_layer_is_marked(shown: Show) -> None:
    tab = shown(sample())
    assert tab.value("all('#firing-plot g[id] > path').map((each) => each.getTotalLength() > 100)") == [True] * 4
    stroke = "all('#firing-plot g[id] > path').map((each) => getComputedStyle(each).strokeWidth)"
    assert tab.value(f"{stroke}.map((each) => parseFloat(each) > 2)") == [True, False, False, False]
    tab.value("all('#firing-table button')[3].click()")
    assert tab.value("all('#ffn')[0].value") == "3"
    assert tab.value(f"{stroke}.map((each) => parseFloat(each) > 2)") == [False, False, False, True]
    assert tab.texts("#told")[0].startswith("Chosen: rank 1 fires on 60.0% of the tokens, rank 30 fires on ")
    assert tab.texts("#rates-table caption") == ["Slots of model.layers.3.mlp by firing rate"]
    assert tab.texts(".chart .chosen title") == ["model.layers.3.mlp"]


def test_phone(shown: Show) -> None:
    tab = shown(sample(), "#slot=3:18")
    tab.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    tab.value("all('details').forEach((each) => { each.open = true; })")
    tab.until("all('#firing-plot svg')[0].getBoundingClientRect().width <= 336")
    assert tab.value("[document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth]") == [360] * 3
    assert tab.value("all('#firing-table .scroll').every((each) => each.scrollWidth > each.clientWidth)")


def brightness(colour: str) -> float:
    """Relative luminance of a CSS colour, as in WCAG."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(shown: Show, scheme: str) -> None:
    tab = shown(sample(), "#slot=3:17")
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    back = brightness(tab.value("getComputedStyle(document.body).backgroundColor"))
    assert (back > 0.5) == (scheme == "light")
    for kind in ("body", ".note", "nav a", ".gone", "caption"):
        low, high = sorted((back, brightness(tab.value(f"getComputedStyle(all('{kind}')[0]).color"))))
        assert (high + 0.05) / (low + 0.05) >= 4.5, kind


def test_controls_and_tables_have_names(shown: Show) -> None:
    tab = shown(sample())
    assert tab.value("all('input, select').every((each) => each.labels.length === 1)")
    assert tab.value("all('table').every((each) => each.caption && each.querySelector('th[scope=row]'))")
    titled = "each.ariaLabelledByElements.length === 2 && each.querySelector('title').textContent"
    assert tab.value(f"all('.chart > svg').every((each) => {titled})")
    levels = tab.value("all('h1, h2, h3, h4').filter((each) => each.checkVisibility()).map((each) => +each.tagName[1])")
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_missing_parts_are_left_out(shown: Show) -> None:
    whole = sample()
    sections = {"firing": "firing", "slots": "slots", "coherence": "values", "lens": "lens", "removed": "removed"}
    fewer = [{key: item for key, item in whole.items() if key != each} for each in whole]
    bare = {key: [{"name": "a", "id": "0:0"}] for key in ("firing", "slots", "coherence", "lens")}
    for data in (*fewer, bare, {}, dict.fromkeys(whole), {key: [] for key in sections}):
        tab = shown(data)
        assert tab.complaints() == [], data.keys()
        names = tab.value("all('main > section:not([hidden])').map((each) => each.id)")
        # Without the list of slots the removed ones are still told of, by their numbers.
        assert names == [section for key, section in sections.items() if data.get(key)]


def test_many_layers_and_slots(shown: Show) -> None:
    tab = shown(sample(layers=100, width=50), "#slot=99:49")
    assert tab.texts("#card")[0].startswith("Slot 99:49")
    assert tab.texts("#found") == ["5,000 of 5,000 slots"]
    for hits in (100, 200):
        assert tab.value("all('#hits li').length") == hits
        tab.value("all('#more')[0].click()")
    tab.search("only49")
    assert tab.texts("#found") == ["100 of 5,000 slots"]
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    assert tab.complaints() == []
