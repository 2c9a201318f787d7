"""The page of runs and of comparisons: it says what the data say, names stay names, and it works in a browser."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvprune
from kvprune.artifacts import read_json
from kvprune.cli import main
from kvprune.errors import KvpruneError
from kvprune.pages.plots import Axis, Line, Plot, svg
from kvprune.results.report import page
from tests.browser import Browser, Parsed
from tests.conftest import recipe_data, save_model, words

SCRIPT = "</script><script>alert(1)</script>"
HOSTILE = [SCRIPT, "<img src=x onerror=alert(1)>", "{{ 7 * 7 }}{% raw %}", "\x1b[31m\u202e\ud800$x_2$'\"&amp;"]
TASK = f"task<b>{HOSTILE[2]}"
LAYERS = 6
Show = Callable[..., Browser]


def one_run(name: str, at: int) -> dict[str, Any]:
    """What `gather` tells of a run."""
    names = [f"model.layers.{layer}.mlp" for layer in range(LAYERS)]
    rest = {"target": "residual", "ridge": 0.1, "damping": 0.1, "bias": False, "refitted": True, "expert": None}
    rates = {"experts": 0, "never_routed": 0, "width": 512, "over_peak": 0.12, "gini": 0.81, "effective": 310.4}
    rare = {"rare_1000": 0.21, "rare_10000": 0.002, "over_rms": {"0.5": 0.5, "1": 0.3, "2": 0.05, "4": 0.006}}
    ranked = [[rank, 0.6 / rank] for rank in (1, 4, 30, 100, 512)]
    after = {"slots": 2400 - 300 * at, "ffn_params": 9600 - 1200 * at, "total_params": 20000 - 1200 * at}
    recipe = {"model": "some/model", "plan": {"score": HOSTILE[0], "budget": {"keep": (8 - at) / 10}}, "protect": {}}
    return {
        "name": name,
        "run": f"runs/{name}",
        "recipe": recipe,
        "written": f"model: some/model\nplan:\n  score: {HOSTILE[0]}\n",
        "stages": [{"stage": "calibrate", "status": "current", "reason": HOSTILE[1]}],
        "digests": {"recipe.yaml": "a" * 64, "stats.safetensors": "b" * 64},
        "model": {"title": HOSTILE[1], "commit": "0123456789abcdef", "note": "dequantised"},
        "counted": {"tokens": 8064, "device": "cpu", "dtype": "float32", "batch_size": 8},
        "tokens": "c" * 64,
        "made_with": {"torch": "2.13.0", "lm_eval": "0.4.13"},
        "files": {"model.safetensors": "d" * 64},
        "verified": {"tensors": 75, "logit_difference": 1.5e-6, "note": ""},
        "load": f'model = load("runs/{name}/model")',
        "curves": [{"name": each, "ranked": ranked, **rates, **rare} for each in names],
        "plan": {
            "budget": {"keep": (8 - at) / 10},
            "before": {"slots": 3072, "ffn_params": 12288, "total_params": 22688, "bytes": 90752},
            "after": {**after, "bytes": 80000 - 4800 * at},
            "loads": f"loads anywhere {HOSTILE[1]}",
        },
        "widths": [
            {"name": each, "before": 512, "after": 400 - 50 * at + 2 * layer} for layer, each in enumerate(names)
        ],
        "refit": [
            {"name": each, "error_before": 0.2 + layer / 50, "error_after": 0.1 + layer / 60, **rest}
            for layer, each in enumerate(names)
        ],
        "judged": [{"task": TASK, "version": "1.0", "few-shot examples": "0", "lm-eval": "0.4.13"}],
    }


def difference(run: str, against: str, value: float, kind: str, metric: str) -> dict[str, Any]:
    """A difference as `compare` tells it."""
    ends = {"interval": [value - 0.0213, value + 0.0321], "corrected": [value - 0.0413, value + 0.0521]}
    what = {"run": run, "against": against, "task": TASK, "metric": metric, "documents": 60, "kind": kind}
    return {**what, "value": value, **ends, "verdict": "worse", "by": "bootstrap"}


def comparison(names: list[str]) -> dict[str, Any]:
    """A comparison of runs that are ever smaller and ever worse, but for the last, which is both."""
    runs = {name: one_run(name, at) for at, name in enumerate(names)}
    units = {"slots": "FFN slots", "ffn_params": "FFN parameters", "total_params": "parameters", "bytes": "bytes"}
    before = runs[names[0]]["plan"]["before"]
    columns: list[dict[str, Any]] = [
        {"name": label, "unit": unit, "higher_is_better": False, "dense": before[unit], "best": [names[-1]]}
        | {"runs": {name: run["plan"]["after"][unit] for name, run in runs.items()}}
        for unit, label in units.items()
    ]
    losses = {name: 26.4 + at for at, name in enumerate(names)}
    for metric, dense, higher in (("token_perplexity", 26.19, False), ("acc", 0.4321, True), ("mcc", 0.1, None)):
        about = {"name": f"{TASK}: {metric}", "task": TASK, "metric": metric, "higher_is_better": higher}
        columns.append({**about, "dense": dense, "runs": losses, "best": []})
    pairs = [("token_perplexity", "ratio"), ("acc", "difference")]
    differences = [
        difference(name, against, 1.1111 + at / 10 if kind == "ratio" else -0.0111 - at / 100, kind, metric)
        for metric, kind in pairs
        for against in (names[0], "dense")
        for at, name in enumerate(names)
        if name != against
    ]
    fronts = {"parameters": names[::-1], "bytes": names[::-1], "prefill speed": names[:1]}
    return {
        "model": {"title": HOSTILE[1], "note": ""},
        "runs": {name: f"runs/{name}" for name in names},
        "trained": {},
        "against": names[0],
        "left_out": [HOSTILE[0]],
        "columns": columns,
        "differences": differences,
        "level": 0.95,
        "correction": {"method": "Bonferroni", "comparisons": 10},
        "pareto": {"task": TASK, "metric": "token_perplexity", "fronts": fronts},
    }


def sample(*names: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Runs and their comparison."""
    some = list(names or (HOSTILE[0], "keep=0.7", HOSTILE[3]))
    return [one_run(name, at) for at, name in enumerate(some)], comparison(some)


@cache
def sample_page() -> str:
    """The page of the sample."""
    return page(*sample())


def tables(text: str) -> dict[str, list[list[str]]]:
    """The cells of all tables by their captions."""
    found = {}
    for part in re.findall("<table>.*?</table>", text, re.DOTALL):
        rows = [re.findall(r"<t[hd].*?><bdi>(.*?)</bdi></t[hd]>", row, re.DOTALL) for row in part.split("<tr>")[1:]]
        found[re.findall("<caption><bdi>(.*?)</bdi>", part, re.DOTALL)[0]] = rows
    return found


# What it says.


def test_hostile_names_stay_names() -> None:
    parsed = Parsed(sample_page().encode().decode())  # a lone surrogate would not go into a file
    plain, other = sample("a", "b", "c")
    others = Parsed(page(plain, other))
    assert parsed.elements and [tag for tag, _ in parsed.elements] == [tag for tag, _ in others.elements]
    assert not any("alert" in each for each in parsed.texts["script"])
    assert "49" not in "".join(parsed.texts["caption"])  # no template in the data is filled in
    assert "‹U+001B›[31m‹U+202E›‹U+D800›$x_2$'\"&amp;" in parsed.texts["bdi"]
    assert f"1 {SCRIPT}" in parsed.texts["bdi"]
    assert any(each.startswith(f"{SCRIPT}: 20,000 parameters, × 1.11 [1.09, 1.14]") for each in parsed.texts["title"])


def test_only_its_own_style_and_script_may_run() -> None:
    text = sample_page()
    parsed = Parsed(text)
    policy = next(each["content"] for tag, each in parsed.elements if tag == "meta" and "http-equiv" in each) or ""
    for kind, content in (("script", parsed.texts["script"][0]), ("style", parsed.texts["style"][0])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    attributes = [(name, value) for _, each in parsed.elements for name, value in each.items()]
    assert not [name for name, _ in attributes if name.startswith("on") or name in {"style", "src", "action"}]
    assert all(str(value).startswith(("#", "data:")) for name, value in attributes if name == "href")
    assert not re.search("https?:", text)
    ids = [value for name, value in attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for name, value in attributes:
        if name in {"aria-labelledby", "href"} and not str(value).startswith("data:"):
            assert {part.removeprefix("#") for part in str(value).split()} <= set(ids), value


def test_values_are_those_of_the_data() -> None:
    runs, found = sample("one", "two", "three")
    cells = tables(page(runs, found))
    row = next(row for row in cells["Sizes, metrics and speed (★: best of the runs)"] if row[0] == "two")
    assert row[1:5] == ["2,100", "8,400", "18,800", "75,200"]
    assert row[5] == "27.4"
    apart = cells["Against dense, paired by document"][2]
    assert html.unescape(apart[1]) == f"{TASK}: token perplexity"
    assert [apart[0], *apart[2:]] == ["two", "60", "× 1.211", "× 1.19 to 1.243", "× 1.17 to 1.263", "worse"]
    sizes = ["2,100 (68.4%)", "8,400 (68.4%)", "18,800 (82.9%)", "75,200 (82.9%)"]
    assert cells["Budgets as requested, and sizes with what is kept"][3] == ["two", "keep 0.7", *sizes]
    widths = cells["Slots of each feed-forward network"]
    assert widths[0] == ["FFN", "dense", "one", "two", "three"]
    assert widths[6] == ["model.layers.5.mlp", "512", "410", "360", "310"]
    refit = cells["Refit of one: error on held-back tokens, as a share of what the dense FFN writes"]
    assert refit[6] == ["model.layers.5.mlp", "0.3000", "0.1833", "0.1", "–"]
    varied = cells["Recipe values in which the runs differ"]
    assert varied[0] == ["Run", "plan.budget.keep"]
    assert cells["Files of two"][3] == ["model/model.safetensors", "d" * 64]
    assert cells["How each task was evaluated"][1][1:] == ["1.0", "0", "0.4.13"]


def test_same_data_same_bytes() -> None:
    runs, found = sample()
    before = deepcopy((runs, found))
    assert page(runs, found) == page(*deepcopy((runs, found)))
    assert (runs, found) == before


def test_points_lie_where_the_data_say() -> None:
    """On a linear axis the distances of points are as those of the values."""
    values = [1.0, 1.25, 2.0]
    lines = [
        Line(f"run-{at}", "", [(at, y)], joined=False, intervals=[(y - 0.1, y + 0.2)]) for at, y in enumerate(values)
    ]
    text = svg(Plot("some", "t", "d", Axis("x"), Axis("y"), lines))
    points = [float(y) for y in re.findall(r'id="some-run-\d".*?<use [^>]*? y="([\d.]+)"', text)]
    bars = re.findall(r'<g class="interval"><path d="M [\d.]+ ([\d.]+) L [\d.]+ ([\d.]+)"', text)
    up, down = (abs(points[1] - float(end)) for end in (bars[1][1], bars[1][0]))
    assert up / down == pytest.approx(2, rel=0.01)
    spans = [points[0] - points[1], points[1] - points[2]]
    assert spans[1] / spans[0] == pytest.approx(3, rel=0.01)


def test_a_plot_of_nothing_and_of_what_cannot_be_drawn() -> None:
    axis = Axis("x")
    assert svg(Plot("p", "t", "d", axis, axis, [])) == ""
    assert svg(Plot("p", "t", "d", axis, axis, [Line("a", "", [(1, float("nan"))])])) == ""
    assert "<use" in svg(Plot("p", "t", "d", axis, axis, [Line("a", "", [(1, float("inf")), (1, 2)])]))


def test_an_infinite_perplexity_is_told_and_not_drawn() -> None:
    runs, found = sample("one", "two")
    for item in found["differences"]:
        if item["run"] == "two":
            item |= {"value": float("inf"), "interval": [float("inf")] * 2}
    text = page(runs, found)
    assert "not finite, and not drawn: two" in text
    assert "quality-0-bytes-run-1" in text
    assert "quality-0-bytes-run-2" not in text


def test_a_metric_of_which_it_is_not_known_what_is_better() -> None:
    runs, found = sample("one", "two")
    found["pareto"]["fronts"] = {}
    text = page(runs, found)
    assert "Pareto" not in text
    assert "quality-0-bytes-run-2" in text


def test_a_run_that_has_begun() -> None:
    whole = one_run("begun", 0)
    for parts in (["plan", "widths", "refit", "judged", "load", "verified", "files"], ["curves", "model", "made_with"]):
        for part in parts:
            del whole[part]
        text = page([whole])
        assert "<h1><bdi>begun</bdi></h1>" in text
    assert re.findall("<h2.*?>(.*?)</h2>", text) == ["Recipe and provenance"]


# From runs to pages.


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Two small runs of one model, one of them refitted."""
    base = tmp_path_factory.mktemp("report")
    (base / "text.txt").write_text(words(500), encoding="utf-8")
    data = recipe_data(save_model(base / "model"), base / "text.txt")
    (base / "recipe.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPRUNE_CACHE", str(base / "cache"))
        kvprune.run(base / "recipe.yaml", base / "mild", overrides=["refit.method=oneshot"])
        kvprune.run(base / "recipe.yaml", base / "hard", overrides=["plan.budget.keep=0.5"])
        yield base / "mild", base / "hard"


def test_show_and_compare_write_pages(
    made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mild, hard = made
    file = tmp_path / "page.html"
    assert main(["show", str(mild), "--html", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == kvprune.show(mild)
    text = file.read_text(encoding="utf-8")
    results = read_json(mild / "eval/results.json")
    row = next(row for row in tables(text)["Dense against slim"] if row[0] == "builtin: token perplexity")
    assert row[1:3] == [f"{results[which]['tasks']['builtin']['token_perplexity']:.4g}" for which in ("dense", "slim")]
    assert re.findall("<h2.*?>(.*?)</h2>", text) == [
        "Quality against size", "Results", "Budgets", "Widths", "Firing", "Error before and after the refit",
        "Evaluation", "Recipe and provenance",
    ]  # fmt: skip
    assert (mild / "recipe.yaml").read_text() in text
    assert tables(text)["How each task was evaluated"][1][3:5] == ["1 of 16", "1"]
    assert main(["compare", str(mild), str(hard), "--html", str(file)]) == 0
    second = file.read_text(encoding="utf-8")
    assert "2 runs compared" in second
    assert len(re.findall(r'id="firing-\d', second)) == 4  # one calibration, one plot: two layers, title, description
    assert "no interval: fewer than 10 documents, or no mean over them" in second
    found = kvprune.compare([mild, hard], html=file)
    assert file.read_text(encoding="utf-8") == second
    slots = next(column for column in found["columns"] if column.get("unit") == "slots")
    assert f"{slots['runs']['hard']:,}" in second


def test_only_pages_of_its_own_are_written_over(made: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "thesis.html"
    file.write_text("<!doctype html>\n<title>my thesis</title>")
    refused = "exists and was not written by kvprune; use another name"
    with pytest.raises(KvpruneError, match=refused):
        kvprune.show(made[0], html=file)
    with pytest.raises(KvpruneError, match=refused):
        kvprune.compare(made, html=file)
    with pytest.raises(KvpruneError, match="there is no folder"):
        kvprune.show(made[0], html=tmp_path / "gone" / "page.html")
    assert list(tmp_path.iterdir()) == [file]


# In a browser.


@pytest.fixture
def shown(browser: Browser, tmp_path: Path) -> Show:
    """Shows a page in the browser, at a width and in a scheme."""
    browser.reset()

    def show(text: str, width: int = 1440, scheme: str = "light") -> Browser:
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        phone = width < 600
        browser.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1 + phone, mobile=phone
        )
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.open((tmp_path / "page.html").as_uri())
        return browser

    return show


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_page_is_drawn(shown: Show, width: int, scheme: str) -> None:
    tab = shown(sample_page(), width, scheme)
    assert tab.complaints() == []
    asked = [told["request"]["url"].split(":")[0] for told in tab.told("Network.requestWillBeSent")]
    assert sorted(set(asked) | {"data"}) == ["data", "file"]
    tab.value("all('details').forEach((each) => { each.open = true; })")
    assert tab.value("[document.documentElement.scrollWidth <= innerWidth, innerWidth]") == [True, width]
    sizes = "all('.chart > svg').map((each) => each.getBoundingClientRect()).map((box) => [box.width, box.height])"
    assert all(wide > 300 and high > 200 for wide, high in tab.value(sizes))
    assert tab.value("all('.chart > svg').length") == 4 + 1 + 1 + 3
    assert tab.value("all('#quality-0-bytes-run-1 use, #quality-0-bytes-run-3 use').length") == 2
    assert tab.value("all('#quality .chart svg')[0].querySelectorAll('.interval').length") == 3
    assert tab.value("all('[id^=widths-run-] > path').map((each) => each.getTotalLength() > 200)") == [True] * 3
    assert tab.value("all('[id^=widths-run-] use').length") == 3 * LAYERS
    assert tab.value("all('[id^=firing-0-layer-] > path').length") == LAYERS
    ink = tab.value("getComputedStyle(all('.chart text')[0]).fill")
    paper = tab.value("getComputedStyle(document.body).backgroundColor")
    line = tab.value("getComputedStyle(all('#widths-run-1 > path')[0]).stroke")
    light = sum(map(int, re.findall(r"\d+", paper)[:3])) > 384
    assert light == (scheme == "light")
    assert (sum(map(int, re.findall(r"\d+", ink)[:3])) < 384) == light
    assert line == ("rgb(11, 92, 173)" if light else "rgb(133, 189, 247)")


def test_headings_tables_and_plots_have_names(shown: Show) -> None:
    tab = shown(sample_page())
    levels = tab.value("all('h1, h2, h3').map((each) => +each.tagName[1])")
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert tab.value("all('table').every((each) => each.caption && each.querySelector('thead th[scope=col]'))")
    assert tab.value("all('tbody tr').every((each) => each.querySelector('th[scope=row]'))")
    titled = "each.ariaLabelledByElements.length === 2 && each.querySelector('title').textContent"
    assert tab.value(f"all('.chart > svg').every((each) => each.role === 'img' && {titled})")
    assert tab.value("all('section').every((each) => each.ariaLabelledByElements.length === 1)")


def test_keyboard(shown: Show) -> None:
    tab = shown(sample_page())

    def tabbed() -> str:
        tab.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", windowsVirtualKeyCode=9)
        tab.call("Input.dispatchKeyEvent", type="keyUp", key="Tab", windowsVirtualKeyCode=9)
        assert tab.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        name: str = tab.value("document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent")
        return name

    assert tabbed() == "Skip to the figures"
    assert tab.value("document.activeElement.getBoundingClientRect().left >= 0")
    titles = tab.texts("nav a")
    assert [tabbed() for _ in titles] == titles
    assert tabbed() == "Sizes, metrics and speed (★: best of the runs)"


@pytest.mark.parametrize("allowed", [True, False])
def test_commands_are_copied(shown: Show, allowed: bool) -> None:
    tab = shown(page([one_run("one", 0)]))
    tab.call("Browser.resetPermissions")
    if allowed:
        tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    else:
        tab.value("Object.defineProperty(navigator, 'clipboard', { value: undefined }) && 1")
    assert tab.texts(".command button") == ["Copy"] * 4
    tab.value("all('.command button')[1].focus()")
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", windowsVirtualKeyCode=13, text="\r")
    tab.call("Input.dispatchKeyEvent", type="keyUp", key="Enter", windowsVirtualKeyCode=13)
    tab.until("all('#copied')[0].textContent !== ''")
    command = "kvprune run runs/one/recipe.yaml -o runs/one"
    if allowed:
        assert tab.texts("#copied") == ["Copied"]
        tab.call("Page.bringToFront")
        answer = tab.call(
            "Runtime.evaluate", expression="navigator.clipboard.readText()", awaitPromise=True, returnByValue=True
        )
        assert answer["result"]["value"] == command
    else:
        assert tab.value("getSelection().toString()") == command
    assert tab.complaints() == []


def test_without_a_script_all_of_it_is_there(shown: Show, browser: Browser) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab = shown(sample_page(), 390)
        assert tab.value("[all('svg').length > 8, all('.command button').length]") == [True, 0]
        assert tab.texts(".command code")[0].startswith("kvprune compare ")
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_print(shown: Show) -> None:
    tab = shown(sample_page(), 740, "dark")
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    tab.call("Emulation.setEmulatedMedia", media="print", features=dark)
    assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.value("getComputedStyle(all('#widths-run-1 > path')[0]).stroke") == "rgb(11, 92, 173)"
    assert tab.value("[...all('nav'), ...all('button')].every((each) => getComputedStyle(each).display === 'none')")
    assert tab.value("all('.scroll').every((each) => getComputedStyle(each).overflow === 'visible')")
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    tab.value("dispatchEvent(new Event('beforeprint')) && all('details').every((each) => each.open)")
    tab.value("dispatchEvent(new Event('afterprint'))")
    assert tab.value("all('details[open]').length") == 0
