"""The calibration text decides what survives: perplexity of every text under calibration on every other.

    KVPRUNE_DATA=folder python scripts/bench_texts.py

SmolLM2-135M-Instruct (builtin), score wanda, keep 0.8, round_to 1, no refit, 32,768 tokens in sequences of 512;
perplexity on the first windows of 1,024 tokens of WikiText-2 test, Python's documentation and LAMBADA, no BOS,
bfloat16. The documentation that is counted and the documentation that is judged are different pages.
"""

import argparse
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from bench_scores import perplexity
from quality_judge import WINDOW

import kvprune
from kvprune.dense import open_dense
from kvprune.recipe import make_recipe
from kvprune.results.table import grid
from kvprune.sources.models import BUILTIN, load_tokenizer
from kvprune.sources.tasks import BUILTIN_FOLDER
from kvprune.stages.export import mask_slots


def documentation() -> list[str]:
    """Python's documentation as the builtin task has it, in documents."""
    spec = importlib.util.spec_from_file_location("builtin_text", BUILTIN_FOLDER / "builtin_text.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.documents())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=10, help="of 1,024 tokens a text")
    parser.add_argument("--tokens", type=int, default=32768)
    arguments = parser.parse_args()
    if not os.environ.get("KVPRUNE_DATA"):
        raise SystemExit("KVPRUNE_DATA is not set: it names the folder with WikiText-2 and LAMBADA")
    data = Path(os.environ["KVPRUNE_DATA"])
    dense = open_dense(BUILTIN)
    tokenizer = load_tokenizer(dense.source)
    pages = documentation()
    judged_pages = arguments.windows * WINDOW * 5 // 4_000 + 1  # under five characters a token
    lambada = [
        json.loads(row)["text"] for row in (data / "lambada_openai.test.jsonl").read_text("utf-8").split("\n") if row
    ]
    judged = {
        "WikiText-2": (data / "wikitext2.test.txt").read_text("utf-8"),
        "Python documentation": "\n\n".join(pages[:judged_pages]),
        "LAMBADA": "\n".join(lambada[: arguments.windows * 20]),
    }
    tokens = {name: tokenizer(text, verbose=False)["input_ids"] for name, text in judged.items()}
    model = dense.load("auto", "cpu")
    rows = [["calibrated on", *judged]]

    def judge(name: str, model: Any) -> None:
        figures = [perplexity(model, ids, arguments.windows) for ids in tokens.values()]
        rows.append([name, *(f"{figure:.2f}" for figure in figures)])
        print(rows[-1], flush=True)

    judge("(dense)", model)
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder) / "documentation.txt"
        counted.write_text("\n\n".join(pages[judged_pages:]), encoding="utf-8")
        wikitext = str(data / "wikitext2.valid.txt")
        texts: dict[str, Any] = {
            "WikiText-2": wikitext,
            "Python documentation": str(counted),
            "builtin": "builtin",
            "self": "self",
            "half WikiText-2, half builtin": [
                {"source": wikitext, "weight": 0.5},
                {"source": "builtin", "weight": 0.5},
            ],
        }
        for name, text in texts.items():
            calibrate = {"text": text, "tokens": arguments.tokens, "sequence_length": 512}
            plan = {"score": "wanda", "budget": {"keep": 0.8}, "round_to": 1}
            run = Path(folder) / name
            kvprune.calibrate(make_recipe({"model": BUILTIN, "calibrate": calibrate, "plan": plan}), run)
            model = dense.load("auto", "cpu")
            mask_slots(model, dense.layout, kvprune.plan(run))
            judge(name, model)
    print(grid(rows))


if __name__ == "__main__":
    main()
