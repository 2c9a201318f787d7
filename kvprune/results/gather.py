"""What the page of a run or of a comparison tells of each run, read from its folder: plain data."""

from dataclasses import asdict
from typing import Any

from kvprune.artifacts import RunFolder, digest, read_json, read_meta, result_file
from kvprune.card import load_command
from kvprune.ffn.stats import read_stats
from kvprune.reading.firing import firing, grouped
from kvprune.recipe import dump_recipe
from kvprune.results.figures import make_figures
from kvprune.results.show import describe
from kvprune.schema import Recipe
from kvprune.staleness import StageState

MOST_VALUES = 3  # of a task's parts that are told one by one


def gather(name: str, run: RunFolder, recipe: Recipe, states: dict[str, StageState], *, alone: bool) -> dict[str, Any]:
    """What `describe` tells of a run, and what a page tells beside: firing curves, how it was judged, what made it.

    `alone` adds intervals of the results against the dense model, which a comparison has already.
    """
    about = describe(run, recipe, states)
    found: dict[str, Any] = {**about, "name": name, "written": dump_recipe(recipe), "digests": _digests(run)}
    if "firing" in about:
        stats, meta = read_stats(run.stats)
        found["curves"] = firing(stats, meta["layout"]["ffns"])
        found |= {"tokens": meta["inputs"]["tokens"], "made_with": meta["made_with"]}
    if "plan" in about:
        found["widths"] = _widths(run)
    if "checkpoint" in about:
        card = read_json(run.model / "kvprune.json")
        found |= {"made_with": card["made_with"], "files": card["digests"], "verified": card["verified"]}
        found["load"] = load_command(str(run.model), card["trust_remote_code"])
    if "results" in about:
        found["judged"] = [judged(task, run) for task in about["results"]["slim"]["tasks"]]
        if alone:
            found["figures"] = [asdict(figure) for figure in make_figures(run, about["results"])]
    return found


def judged(task: str, run: RunFolder) -> dict[str, str]:
    """How a task was evaluated, by what people call it."""
    file = result_file(run.eval / "slim", task)
    if not file.is_file():
        return {"task": task}
    result = read_json(file)
    key, output = result["key"], result["lm_eval"]
    counts = (output.get("n-samples") or {}).values()
    documents = sum(count["effective"] for count in counts), sum(count["original"] for count in counts)
    return {
        "task": task,
        "version": _values(output.get("versions")),
        "few-shot examples": _values(output.get("n-shot")),
        "documents": f"{documents[0]:,} of {documents[1]:,}" if documents[1] else "–",
        "limit": "none" if key["limit"] is None else f"{key['limit']:,}",
        "longest context": "the model's" if key["max_length"] is None else f"{key['max_length']:,} tokens",
        "chat template": "yes" if key["apply_chat_template"] else "no",
        "system instruction": key["system_instruction"] or "none",
        "dtype": key["dtype"].removeprefix("torch."),
        "device": key["device"],
        "batch": str(key["batch_size"]),
        "lm-eval": key["tasks"]["versions"]["lm_eval"],
    }


def _values(found: dict[str, Any] | None) -> str:
    """The values of a task's parts, where they differ a few of them."""
    some = list(dict.fromkeys(str(value) for value in (found or {}).values()))
    more = ", …" if len(some) > MOST_VALUES else ""
    return ", ".join(some[:MOST_VALUES]) + more or "–"


def _widths(run: RunFolder) -> list[dict[str, Any]]:
    """Slots of each FFN before and after, all experts of a layer taken together."""
    ffns = read_json(run.plan)["ffns"]
    counted = read_meta(run.stats)["layout"]["ffns"] if run.stats.is_file() else []
    expert = {ffn["name"]: ffn["expert"] for ffn in counted}
    named = [{"name": ffn["name"], "expert": expert.get(ffn["name"])} for ffn in ffns]
    return [
        {
            "name": name,
            "before": sum(ffns[at]["width_before"] for at in members),
            "after": sum(len(ffns[at]["kept"]) for at in members),
        }
        for name, members in grouped(named).items()
    ]


def _digests(run: RunFolder) -> dict[str, str]:
    """SHA-256 of the artifacts that there are."""
    files = (run.recipe, run.stats, run.plan, run.values, run.model / "kvprune.json", run.recovered, run.results)
    return {file.relative_to(run.path).as_posix(): digest(file) for file in files if file.is_file()}
