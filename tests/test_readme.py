"""What the README says can be typed, and is what the code does."""

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvprune.arguments import parser
from kvprune.recipe import make_recipe, parse_yaml

PROJECT = Path(__file__).parents[1]
README = (PROJECT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", README)


def all_keys() -> str:
    return next(block for block in blocks("yaml") if block.startswith("model:"))


def test_all_keys_are_told_with_their_defaults() -> None:
    told = parse_yaml(all_keys(), "README.md")
    recipe = make_recipe({"model": told["model"]}).model_dump(mode="json")
    for section, values in told.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            assert (
                plain(make_recipe({"model": told["model"], section: {key: value}}), section, key)
                == (recipe[section][key])
            ), f"{section}.{key}"


def plain(recipe: Any, section: str, key: str) -> Any:
    return recipe.model_dump(mode="json")[section][key]


def test_no_key_is_left_out() -> None:
    section, told = "", set()
    for line in all_keys().splitlines():
        if found := re.match(r"(\s*)(?:# )?(\w+):", line):
            section = section if found[1] else found[2]
            told.add(f"{section}.{found[2]}" if found[1] else section)
    fields = make_recipe({"model": "m"}).model_dump(mode="json")
    there = set(fields) | {f"{name}.{key}" for name, part in fields.items() if isinstance(part, dict) for key in part}
    assert told == there


def commands() -> list[str]:
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("kvprune ")]


@pytest.mark.parametrize("line", commands())
def test_every_command_is_one(line: str) -> None:
    for part in line.split(" && "):
        parser().parse_args(shlex.split(part, comments=True)[1:])


def options() -> set[str]:
    """Every long option of every verb."""
    subparsers = next(action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    made = [parser(), *subparsers.choices.values()]
    found = {name for each in made for action in each._actions for name in action.option_strings}
    return {name for name in found if name.startswith("--")} - {"--help"}


def test_every_flag_is_told_and_there_is_no_other() -> None:
    table = README[README.index("| flag | of |") : README.index("Exit status:")]
    assert set(re.findall(r"--[a-z][a-z-]+", table)) == options()


def anchors() -> set[str]:
    titles = re.findall(r"(?m)^#{1,4} (.*)$", README)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    for link in links:
        if link.startswith("#"):
            assert link[1:] in anchors(), link
        elif not link.startswith("http"):
            assert (PROJECT / link).exists(), link


def test_scripts_that_are_named_are_there() -> None:
    names = set(re.findall(r"scripts/[\w.]+\w", README))
    assert names
    assert {name for name in names if not (PROJECT / name).exists()} == set()
