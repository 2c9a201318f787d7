"""The page of `kvprune inspect`: nothing in a model's text breaks out of it, and it works in a browser."""

import base64
import hashlib
import json
import math
import os
import re
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from fcntl import F_DUPFD_CLOEXEC, fcntl
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvprune.reading.page import embedded, page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
PATIENCE = 60  # seconds for anything that a browser is asked
SCRIPT = "</script><script>alert(1)</script>"
IMAGE = "<img src=x onerror=\"document.title='broken'\">"
MARKUP = [SCRIPT, IMAGE, "<!--<script>", "]]>", "&lt;b&gt;", "'\"`${1}$policy"]
HOSTILE = [*MARKUP, "\u2028\u2029", "\ud800", "\x00\x1b[31m"]
BLANK = [" the", "\n", "\t\t", "    ", "\u00a0", "\u200b", "\x07", "\ufffd", ""]
TOKENS = [*BLANK, " שלום", " كتاب", "\u0301", "東京", *HOSTILE]
Show = Callable[..., "Browser"]


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


class Parsed(HTMLParser):
    """Elements of a page with their attributes, and the text within each kind."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.within = self.texts.setdefault(tag, [])
        self.within.append("")

    def handle_data(self, data: str) -> None:
        if self.elements:
            self.within[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.within = [""]


def test_hostile_text_stays_data() -> None:
    parsed = Parsed(page(sample()).encode().decode())  # a lone surrogate would not go into a file
    assert json.loads(parsed.texts["script"][0]) == sample()
    assert "alert" not in parsed.texts["script"][1]
    assert parsed.texts["title"] == [f"SmolLM2 {SCRIPT} · kvprune inspect"]
    assert parsed.elements == Parsed(page({})).elements  # so that none comes from the data


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
    assert "http:" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in text


def test_same_data_same_bytes() -> None:
    data = sample()
    turned = dict(reversed(deepcopy(data).items()))
    assert page(data) == page(turned) == page(deepcopy(data))
    assert data == sample()


def pipe() -> tuple[int, int]:
    """Both ends of a pipe, as descriptors above those that a browser speaks on."""
    low = os.pipe()
    ends = fcntl(low[0], F_DUPFD_CLOEXEC, 10), fcntl(low[1], F_DUPFD_CLOEXEC, 10)
    for each in low:
        os.close(each)
    return ends


class Browser:
    """A headless browser with one tab, spoken to in the DevTools protocol over a pair of pipes."""

    def __init__(self, binary: str, profile: Path) -> None:
        (theirs, self.requests), (self.answers, mine) = pipe(), pipe()
        pipes = [(os.POSIX_SPAWN_DUP2, theirs, 3), (os.POSIX_SPAWN_DUP2, mine, 4)]
        quiet = (os.POSIX_SPAWN_OPEN, 2, str(profile / "stderr"), os.O_WRONLY | os.O_CREAT, 0o600)
        command = [binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = os.posix_spawn(binary, command, os.environ, file_actions=[*pipes, quiet], setpgroup=0)
        for each in (theirs, mine):
            os.close(each)
        self.number, self.heard, self.session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """What the browser answers; events that come before are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        session = {"sessionId": self.session} if self.session else {}
        os.write(self.requests, json.dumps({**message, **session}).encode() + b"\0")
        while (answer := self.next()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def next(self) -> dict[str, Any]:
        """The next message of the browser."""
        while b"\0" not in self.heard:
            assert select.select([self.answers], [], [], PATIENCE)[0], "the browser does not answer"
            part = os.read(self.answers, 2**16)
            assert part, "the browser has ended"
            self.heard += part
        first, self.heard = self.heard.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        return message

    def open(self, address: str) -> None:
        """Goes to a page, and waits until it is loaded."""
        for each in ("about:blank", address):
            self.events.clear()
            self.call("Page.navigate", url=each)
            self.until(f"location.href === {json.dumps(each)} && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """The value of an expression in the page; `all(selector)` has the elements."""
        helper = "const all = (selector) => [...document.querySelectorAll(selector)]; "
        code = f"(() => {{ {helper} return {expression}; }})()"
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """The texts of elements."""
        found: list[str] = self.value(f"all({json.dumps(selector)}).map((each) => each.textContent)")
        return found

    def until(self, expression: str) -> None:
        """Waits until an expression holds in the page."""
        end = time.monotonic() + PATIENCE
        while not self.value(expression):
            assert time.monotonic() < end, expression
            time.sleep(0.02)

    def search(self, text: str) -> None:
        """Types into the search field in place of what stands there, and presses Enter."""
        self.value("(all('#query')[0].focus(), all('#query')[0].select())")
        self.call("Input.insertText", text=text)
        self.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", windowsVirtualKeyCode=13, text="\r")
        self.call("Input.dispatchKeyEvent", type="keyUp", key="Enter", windowsVirtualKeyCode=13)

    def told(self, *methods: str) -> list[dict[str, Any]]:
        """What the events of some kinds say, since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def complaints(self) -> list[dict[str, Any]]:
        """Errors, warnings and messages of the page."""
        return self.told("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")

    def close(self) -> None:
        """Ends the browser and its children."""
        os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        for each in (self.requests, self.answers):
            os.close(each)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests here; they are skipped where none is installed."""
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None:
        pytest.skip(f"no browser is installed (one of {', '.join(BROWSERS)})")
    running = Browser(binary, tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


@pytest.fixture
def shown(browser: Browser, tmp_path: Path) -> Show:
    """Shows data in the browser."""
    browser.call("Emulation.clearDeviceMetricsOverride")
    browser.call("Emulation.setEmulatedMedia", features=[])

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


def test_chosen_layer_is_drawn(shown: Show) -> None:
    tab = shown(sample())
    line = "all('#firing-plot polyline.one')[0].getAttribute('points')"
    first = tab.value(line)
    tab.value("all('#firing-table button')[3].click()")
    assert tab.value("[all('#firing-plot polyline').length, all('#ffn')[0].value]") == [5, "3"]
    assert tab.value(line) != first
    assert tab.texts("#rates-table caption") == ["Slots of model.layers.3.mlp by firing rate"]


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
    assert tab.value("all('.chart > svg').every((each) => each.getAttribute('aria-label'))")
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
