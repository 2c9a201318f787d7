"""Which stages of a run are done, and which no longer fit the recipe or their inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprune.artifacts import FORMAT_VERSION, RunFolder, digest, read_json, read_meta
from kvprune.errors import KvpruneError
from kvprune.recipe import stage_recipe
from kvprune.schema import Recipe
from kvprune.sources.models import fingerprint
from kvprune.sources.tasks import task_fingerprint
from kvprune.sources.texts import text_fingerprint

STAGES = ("calibrate", "plan", "refit", "export", "recover", "evaluate")


@dataclass(frozen=True)
class StageState:
    """`status` is current, stale or missing; `reason` says what changed."""

    stage: str
    status: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.stage} is {self.status}{f': {self.reason}' if self.reason else ''}"


def stage_states(run: RunFolder, recipe: Recipe, stages: Sequence[str] = STAGES) -> dict[str, StageState]:
    """The state of every stage, or of the first few. Reads metadata and digests, no weights and no network."""
    states: dict[str, StageState] = {}
    for stage in stages:
        upstream = next((state for state in states.values() if state.status != "current"), None)
        states[stage] = _state(stage, run, recipe, upstream)
    return states


def first_lacking(run: RunFolder, recipe: Recipe, stages: Sequence[str] = STAGES) -> StageState | None:
    """The first of `stages`, all or the first few, that is missing or stale; None where all are current."""
    return next((state for state in stage_states(run, recipe, stages).values() if state.status != "current"), None)


def artifact(run: RunFolder, stage: str) -> Path:
    """The file that tells that a stage is done."""
    return {
        "calibrate": run.stats,
        "plan": run.plan,
        "refit": run.values,
        "export": run.model / "kvprune.json",
        "recover": run.recovered,
        "evaluate": run.results,
    }[stage]


def _state(stage: str, run: RunFolder, recipe: Recipe, upstream: StageState | None) -> StageState:
    path = artifact(run, stage)
    if stage == "refit" and recipe.refit.method == "none":
        return StageState(stage, "current", "method none: values stay as they are")
    if stage == "recover" and recipe.recover.method == "none":
        return StageState(stage, "current", "method none: nothing is trained")
    if not path.is_file():
        return StageState(stage, "missing")
    found = read_meta(path) if path.suffix == ".safetensors" else read_json(path)
    about = found.get("provenance", found)
    if stage == "recover":
        about = {**about, "improved": found.get("improved")}
    if about.get("version") != FORMAT_VERSION or "inputs" not in about:
        return StageState(stage, "stale", f"{path.name} was made by another version of kvprune")
    now = stage_recipe(recipe, stage)
    then = about["recipe"] if stage != "export" else {}
    if stage == "calibrate" and set(now["calibrate"]["collect"]) < set(then["calibrate"].get("collect", ())):
        now["calibrate"]["collect"] = then["calibrate"]["collect"]  # more was collected than is wanted
    try:
        reason = first_change(then, now) or _input_change(stage, run, recipe, about)
    except KvpruneError as error:  # the model or text is not on this machine: that is no error of a run folder
        reason = str(error)
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
    """What changed among a stage's inputs since it was done, or "". Each stage has its own."""
    inputs = about["inputs"]
    match stage:
        case "calibrate":
            model = fingerprint(recipe.model, about["model"]["commit"])
            texts = text_fingerprint(recipe.calibrate.text)
            changed = [f"the text {name} has changed" for name in texts if inputs["text"].get(name) != texts[name]]
            if inputs["model"] != model:
                changed.insert(0, f"the files of model {recipe.model} have changed")
            return next(iter(changed), "")
        case "plan":
            return _other(run.stats, inputs["stats"])
        case "refit":
            return _other(run.plan, inputs["plan"])
        case "export":
            values = digest(run.values) if recipe.refit.method != "none" and run.values.is_file() else None
            refitted = "" if inputs.get("values") == values else "the refitted values are others than it was made from"
            earlier = "" if "digests" in about else "kvprune.json was written by an earlier kvprune"
            trained = recipe.recover.method == "none" and about.get("recover")
            return (
                _other(run.plan, inputs["plan"])
                or refitted
                or earlier
                or ("model/ was trained, and recover.method is none" if trained else "")
                or next(
                    (
                        f"model/{name} is missing or has changed"
                        for name, size in about["files"].items()
                        if _size(run.model / name) != size
                    ),
                    "",
                )
            )
        case "recover":
            texts = text_fingerprint(recipe.recover.texts)
            changed = [f"the text {name} has changed" for name in texts if inputs["text"].get(name) != texts[name]]
            exported = read_json(run.model / "kvprune.json") if (run.model / "kvprune.json").is_file() else {}
            other = first_change(inputs["exported"], exported.get("inputs"), "export's inputs")
            trained = digest(run.recovered) if about["improved"] else None
            here = (exported.get("recover") or {}).get("report")
            return other or next(iter(changed), "") or ("" if here == trained else "model/ is not what it left")
        case _:
            weights = (
                "the files in model/ have changed" if inputs["weights"] != fingerprint(str(run.model), None) else ""
            )
            tasks = first_change(inputs["tasks"], task_fingerprint(recipe.evaluate), "tasks")
            return _other(run.model / "kvprune.json", inputs["checkpoint"]) or weights or tasks


def _other(path: Path, then: str) -> str:
    return "" if path.is_file() and digest(path) == then else f"{path.name} is another than it was made from"


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
