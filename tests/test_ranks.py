"""Several processes find what one finds; one that dies stops all and spoils nothing."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kvprune
from kvprune import preflight
from kvprune.artifacts import RunFolder, read_meta
from kvprune.cli import main
from kvprune.dense import open_dense
from kvprune.ffn.walk import Setup
from kvprune.ranks import Ranks
from kvprune.recipe import dump_recipe, make_recipe
from kvprune.schema import Recipe
from tests.conftest import recipe_data, tiny_config, tiny_model, tiny_tokenizer, words
from tests.families import family_config

LAYERS = 4
TOKENS = 2048
OPTIONS = kvprune.Options(batch_size=3)  # 64 sequences in 22 batches, the last of one sequence
UNEVEN = kvprune.Options(batch_size=16)  # in 4 batches: a rank has more than another
FEW = kvprune.Options(batch_size=32)  # in 2 batches: none for a third rank
WHOLE = ("histogram", "peak_histogram", "maximum", "tokens", "sequences", "value_norm", "key_norm")
SCALES = {name: name for name in ("total_abs", "total_square", "gate_total")} | {
    "total": "total_abs",
    "sequence_norms": "total_abs",
}

# Rank 1 is killed with the states of its third layer on disk, and nothing said of that layer yet.
KILLED = """
import os, signal, sys
from kvprune.cli import main
from kvprune.ffn import state

real = state.Hidden.commit

def commit(self, layer):
    real(self, layer)
    if layer == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

state.Hidden.commit = commit
sys.exit(main(sys.argv[1:]))
"""
# Several commands for one start of the processes. Each meets at a port of its own, and may be one without a walk.
MANY = """
import json, os, sys
from kvprune.cli import main
from kvprune.dense import Dense
from kvprune.ffn.walk import CannotWalkError

def refuse(*_):
    raise CannotWalkError("its layers are shy")

walker = Dense.walker
for port, walk, arguments in json.loads(sys.argv[1]):
    Dense.walker = walker if walk else refuse
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    if status := main(arguments):
        sys.exit(status)
"""


def torchrun(count: int, *what: str | Path) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, *map(str, what)], capture_output=True, text=True, check=False, env=environment, timeout=300
    )


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [int(item.getsockname()[1]) for item in sockets]
    for item in sockets:
        item.close()
    return ports


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As torchrun has it: matrix products round differently with the number of threads."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of four layers, one with experts, a text, and a recipe of each."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "text.txt").write_text(words(3000), encoding="utf-8")
    configs = {"dense": tiny_config("gemma3", num_hidden_layers=LAYERS), "mixture": family_config("qwen2_moe")}
    for name, config in configs.items():
        tiny_model(config).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
        (folder / f"{name}.yaml").write_text(dump_recipe(recipe_of(folder, name)))
    return folder


def recipe_of(base: Path, model: str = "dense") -> Recipe:
    data = recipe_data(base / model, base / "text.txt")
    return make_recipe({**data, "calibrate": {**data["calibrate"], "tokens": TOKENS}})


def alone(base: Path, options: kvprune.Options, model: str = "dense") -> dict[str, torch.Tensor]:
    """The statistics of one process."""
    run = base / (f"alone-{options.batch_size}" if model == "dense" else f"alone-{model}")
    kvprune.calibrate(recipe_of(base, model), run, options=options)
    return load_file(RunFolder(run).stats)


def assert_counted_alike(run: Path, expected: dict[str, torch.Tensor], processes: int) -> None:
    found = load_file(RunFolder(run).stats)
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        ffn, _, field = key.partition(":")
        if field in WHOLE:
            assert torch.equal(tensor, expected[key]), key
        else:
            scale = expected[f"{ffn}:{SCALES[field]}"]
            assert bool(((tensor - expected[key]).abs() <= 1e-6 * scale).all()), key
    assert read_meta(RunFolder(run).stats)["run"]["processes"] == processes
    assert sorted(path.name for path in run.iterdir()) == ["recipe.yaml", "stats.safetensors"]


def calibrating(base: Path, run: Path, options: kvprune.Options, *more: str, model: str = "dense") -> list[str]:
    """A command line."""
    where = ["-o", str(run), "--batch-size", str(options.batch_size), *more]
    return ["calibrate", str(base / f"{model}.yaml"), *where]


@pytest.fixture(scope="module")
def killed(base: Path) -> subprocess.CompletedProcess[str]:
    """Two processes of which one is killed in the third layer of the run `two`."""
    (base / "killed.py").write_text(KILLED)
    done = torchrun(2, base / "killed.py", *calibrating(base, base / "two", OPTIONS))
    shutil.copytree(base / "two", base / "left")
    return done


@pytest.fixture(scope="module")
def resumed(base: Path, killed: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """The same command again."""
    return torchrun(2, "-m", "kvprune", *calibrating(base, base / "two", OPTIONS, "--json"))


def test_a_killed_process_stops_the_other_with_the_reason(killed: subprocess.CompletedProcess[str]) -> None:
    assert killed.returncode != 0
    assert "error: rank 0: lost the other processes, so this one stops" in killed.stderr
    assert "exitcode  : -9" in killed.stderr
    assert killed.stdout == ""


def test_what_a_killed_process_leaves_is_no_result_and_spoils_none(
    base: Path, killed: subprocess.CompletedProcess[str]
) -> None:
    assert killed.returncode
    assert sorted(path.name for path in (base / "left").iterdir()) == [".walk", "recipe.yaml"]
    expected = alone(base, OPTIONS)
    kvprune.calibrate(base / "dense.yaml", base / "left", options=OPTIONS)
    assert_counted_alike(base / "left", expected, 1)
    assert (base / "left/stats.safetensors").read_bytes() == (base / "alone-3/stats.safetensors").read_bytes()


def test_two_processes_go_on_and_count_what_one_counts(base: Path, resumed: subprocess.CompletedProcess[str]) -> None:
    assert resumed.returncode == 0, resumed.stderr
    assert "calibrate: going on after 2 of 4 layers" in resumed.stderr
    assert resumed.stdout.count("\n") == 1
    assert json.loads(resumed.stdout) == {"stats": str(base / "two/stats.safetensors")}
    assert_counted_alike(base / "two", alone(base, OPTIONS), 2)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("verb", ["run", "plan", "export", "evaluate"])
def test_what_one_process_does_is_refused_to_several(
    verb: str, rank: int, base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(base, OPTIONS)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    where = [str(base / "dense.yaml"), "-o", str(base / "refused")] if verb == "run" else [str(base / "alone-3")]
    assert main([verb, *where]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: kvprune {verb} is the work of one process; torchrun is for calibrate, refit and recover\n"
    assert not (base / "refused").exists()
    assert not (base / "alone-3/plan.json").exists()


def planned(base: Path, name: str, model: str) -> Path:
    """A run that is calibrated and planned."""
    kvprune.calibrate(recipe_of(base, model), base / name, options=OPTIONS)
    kvprune.plan(base / name)
    return base / name


def assert_refitted_alike(run: Path, other: Path) -> list[str]:
    """Returns what was refitted."""
    found, expected = (load_file(RunFolder(place).values) for place in (run, other))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.allclose(tensor, expected[name], rtol=1e-3, atol=1e-4 * float(expected[name].abs().max())), name
    reports = [read_meta(RunFolder(place).values)["ffns"] for place in (run, other)]
    for mine, theirs in zip(*reports, strict=True):
        assert mine.pop("error_before") == pytest.approx(theirs.pop("error_before"), rel=1e-3)
        for error in ("error_after", "error_tried"):
            assert mine.pop(error) == pytest.approx(theirs.pop(error), rel=1e-3)
        assert mine == theirs
    assert not (run / ".walk").exists()
    return list(found)


def refitted(
    base: Path, name: str, method: str, options: kvprune.Options, model: str = "dense"
) -> tuple[Path, list[str]]:
    """A run refitted by one process, and the command line for doing the same to a copy, `name`-ranks."""
    run = planned(base, name, model)
    shutil.copytree(run, base / f"{name}-ranks")
    kvprune.refit(run, overrides=[f"refit.method={method}"], options=options)
    how = ["--set", f"refit.method={method}", "--batch-size", str(options.batch_size)]
    return run, ["refit", str(base / f"{name}-ranks"), *how]


def test_a_refit_by_two_processes_is_that_of_one(base: Path) -> None:
    run, command = refitted(base, "oneshot", "oneshot", OPTIONS)
    done = torchrun(2, "-m", "kvprune", *command, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert len(json.loads(done.stdout)["ffns"]) == LAYERS
    assert len(assert_refitted_alike(base / "oneshot-ranks", run)) == LAYERS


def test_three_processes_share_few_batches_in_memory_and_on_disk(base: Path) -> None:
    recipe = recipe_of(base)
    needed = preflight.need(
        recipe,
        open_dense(recipe.model),
        Setup("cpu", torch.float32, FEW.batch_size, Ranks(0, 3)),
        stage="calibrate",
        whole=False,
    )
    disk = ["--memory", str(needed.least), "--hidden-cache", str(base / "cache")]
    run, command = refitted(base, "sequential", "sequential", UNEVEN)
    mixed, mend_experts = refitted(base, "mixed", "sequential", UNEVEN, "mixture")
    commands = [
        (True, calibrating(base, base / "uneven", UNEVEN)),
        (True, calibrating(base, base / "few", FEW)),
        (True, calibrating(base, base / "disk", FEW, *disk)),
        (False, calibrating(base, base / "forwards", FEW)),
        (True, command),
        (True, command),
        (True, calibrating(base, base / "experts", FEW, model="mixture")),
        (True, mend_experts),
    ]
    (base / "many.py").write_text(MANY)
    ports = free_ports(len(commands))
    done = torchrun(
        3, base / "many.py", json.dumps([[port, *what] for port, what in zip(ports, commands, strict=True)])
    )
    assert done.returncode == 0, done.stderr
    for said in ("in memory", "on disk", "calibrate: by forwards of the whole model"):
        assert said in done.stderr
    assert_counted_alike(base / "uneven", alone(base, UNEVEN), 3)
    for name in ("few", "disk", "forwards"):
        assert_counted_alike(base / name, alone(base, FEW), 3)
    assert (base / "few/stats.safetensors").read_bytes() == (base / "disk/stats.safetensors").read_bytes()
    assert list((base / "cache").iterdir()) == []
    assert len(assert_refitted_alike(base / "sequential-ranks", run)) == LAYERS
    assert "refit: done before, current" in done.stderr
    assert_counted_alike(base / "experts", alone(base, FEW, "mixture"), 3)
    assert [name for name in assert_refitted_alike(base / "mixed-ranks", mixed) if ".experts." in name]
