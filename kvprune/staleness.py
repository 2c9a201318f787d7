"""Which stages of a run are done, and which no longer fit the recipe or their inputs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprune.artifacts import RunFolder, digest, read_json, read_meta
from kvprune.recipe import Recipe, stage_recipe
from kvprune.sources.models import fingerprint
from kvprune.sources.texts import text_fingerprint

STAGES = ("calibrate", "plan", "export", "evaluate")


@dataclass(frozen=True)
class StageState:
    """`status` is current, stale or missing; `reason` says what changed."""

    stage: str
    status: str
    reason: str = ""


def stage_states(run: RunFolder, recipe: Recipe) -> dict[str, StageState]:
    """The state of every stage. Reads metadata and digests, no weights and no network."""
    states: dict[str, StageState] = {}
    for stage in STAGES:
        upstream = next((state for state in states.values() if state.status != "current"), None)
        states[stage] = _state(stage, run, recipe, upstream)
    return states


def artifact(run: RunFolder, stage: str) -> Path:
    """The file that tells that a stage is done."""
    places = {"calibrate": run.stats, "plan": run.plan, "export": run.model / "kvprune.json", "evaluate": run.results}
    return places[stage]


def _state(stage: str, run: RunFolder, recipe: Recipe, upstream: StageState | None) -> StageState:
    path = artifact(run, stage)
    if not path.is_file():
        return StageState(stage, "missing")
    found = read_meta(path) if stage == "calibrate" else read_json(path)
    about = found.get("provenance", found)
    now = stage_recipe(recipe, stage)
    then = about["recipe"] if stage != "export" else {}
    reason = first_change(then, now) or _input_change(stage, run, recipe, about)
    if not reason and upstream is not None:
        reason = f"{upstream.stage} is {upstream.status}"
    return StageState(stage, "stale" if reason else "current", reason)


def first_change(then: Any, now: Any, path: str = "") -> str:
    """The first value in which two plain trees differ, as "path was A and is now B"; "" where they are equal."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in then if key not in now)]:
            change = first_change(then.get(key), now.get(key), f"{path}.{key}" if path else str(key))
            if change:
                return change
        return ""
    return "" if then == now else f"{path} was {then!r} and is now {now!r}"


def _input_change(stage: str, run: RunFolder, recipe: Recipe, about: dict[str, Any]) -> str:
    inputs = about["inputs"]
    if stage == "calibrate":
        if inputs["model"] != fingerprint(recipe.model, about["model"]["commit"]):
            return f"the files of model {recipe.model} have changed"
        if inputs["text"] != text_fingerprint(recipe.calibrate.text):
            return f"the text {recipe.calibrate.text.source} has changed"
        return ""
    name, path = {
        "plan": ("stats", run.stats),
        "export": ("plan", run.plan),
        "evaluate": ("checkpoint", run.model / "kvprune.json"),
    }[stage]
    return "" if path.is_file() and inputs[name] == digest(path) else f"{path.name} is another than it was made from"
