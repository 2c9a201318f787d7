"""Teaching: losses are their formulas, what learns is what should, and a training is a plain loop over its steps."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprune.artifacts import RunFolder
from kvprune.errors import KvpruneError
from kvprune.ffn.find import find_layout
from kvprune.ranks import ALONE, Ranks
from kvprune.schema import Recover
from kvprune.teaching.kept import Kept
from kvprune.teaching.pair import Pair, distance, divergence, text_loss
from kvprune.teaching.students import Student, changed_weights, learning_names, make_student, merged, with_adapters
from kvprune.teaching.training import Course, Curve, teach
from tests.conftest import tiny_config, tiny_model
from tests.families import family_config
from tests.test_ranks import free_ports, torchrun
from tests.test_recover import exported, recover, weights

LENGTH, PER_STEP, STEPS = 16, 4, 8
SECTION = Recover(
    method="distill",
    tokens=STEPS * PER_STEP * LENGTH,
    sequence_length=LENGTH,
    batch_tokens=PER_STEP * LENGTH,
    learning_rate=3e-3,
    rank=None,
)


def section(**values: Any) -> Recover:
    return Recover(**{**SECTION.model_dump(), **values})


def random_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


def config_of(name: str) -> Any:
    """`shape` of SHAPES, or `family:` and one of FAMILIES."""
    return family_config(name.removeprefix("family:")) if name.startswith("family:") else tiny_config(name)


def pupil(config: Any, how: Recover = SECTION, dtype: torch.dtype = torch.float32) -> tuple[Student, Any]:
    """A teacher, and a student that differs from it in the values of its FFNs."""
    teacher, layout = tiny_model(config, dtype).requires_grad_(requires_grad=False), find_layout(config)
    model = copy.deepcopy(teacher)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in {ffn.value.name for ffn in layout.ffns}:
            value = model.get_parameter(name)
            value += 0.1 * torch.randn(value.shape, generator=generator).to(dtype)
    return make_student(model, layout, how, teacher), teacher


def course(how: Recover = SECTION, **more: Any) -> Course:
    plain: dict[str, Any] = {"dtype": "float32", "batch_size": 8, "device": "cpu", "ranks": ALONE}
    return Course(how, random_tokens(how.steps * PER_STEP), {"held": random_tokens(3, seed=1)}, **{**plain, **more})


def taught(config: Any, folder: Path, how: Recover = SECTION, **more: Any) -> tuple[Curve, dict[str, Tensor]]:
    """The curve of a training, and what has been learned at its end."""
    student, teacher = pupil(config, how)
    curve = teach(student, teacher, course(how, **more), Kept(folder, {}))
    there = dict(student.model.named_parameters())
    return curve, {name: there[name].detach() for name in student.trained}


def logits(seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 4, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divergence_is_its_formula(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvprune.teaching.pair.ROWS", rows)
    student, teacher = logits(0).to(dtype).requires_grad_(), logits(1).to(dtype)
    p, q = teacher.double().softmax(2), student.detach().double().softmax(2)
    loss = divergence(student, teacher)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
    (loss * 2).backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert torch.allclose(student.grad.double() / 2, q - p, atol=1e-5 if dtype == torch.float32 else 1e-2)
    assert float(divergence(teacher, teacher)) == 0


def test_divergence_is_the_same_of_logits_that_lie_in_another_order() -> None:
    found = []
    for student in (logits(0), logits(0).transpose(0, 1).contiguous().transpose(0, 1)):
        student.requires_grad_()
        divergence(student, logits(1)).backward()  # type: ignore[no-untyped-call]
        found.append(student.grad)
    assert not student.is_contiguous()
    assert found[0] is not None and found[1] is not None
    assert torch.equal(found[0], found[1])


def test_text_loss_is_what_the_model_says_it_is() -> None:
    tokens, model = random_tokens(3), tiny_model(tiny_config("llama"))
    with torch.no_grad():
        out = model(tokens, labels=tokens)
    assert float(text_loss(out.logits, tokens)) == pytest.approx(float(out.loss) * 3 * (LENGTH - 1), rel=1e-5)


def test_distance_is_its_formula() -> None:
    mine, theirs = [logits(seed) for seed in range(4)], [logits(seed) for seed in range(4, 8)]
    layers = [
        float((a.double() - b.double()).norm(dim=2).square().div(b.double().norm(dim=2).square()).sum())
        for a, b in zip(mine[1:], theirs[1:], strict=True)  # the first is the embedding
    ]
    assert float(distance(tuple(mine), tuple(theirs))) == pytest.approx(sum(layers) / 3, rel=1e-5)
    assert float(distance(tuple(mine), tuple(mine))) == 0
    assert math.isfinite(float(distance(tuple(mine), tuple(torch.zeros_like(state) for state in mine))))


@torch.no_grad()
def test_a_pair_says_the_losses_of_its_two_models() -> None:
    tokens, student, teacher = random_tokens(3), *(tiny_model(tiny_config("llama"), seed=seed) for seed in (0, 1))
    mine, theirs = (model(tokens, output_hidden_states=True) for model in (student, teacher))
    far = divergence(mine.logits, theirs.logits)
    apart = distance(mine.hidden_states, theirs.hidden_states)
    assert len(mine.hidden_states) == 3  # the embedding, and two layers
    assert torch.equal(Pair(student, teacher)(tokens), far)
    assert torch.allclose(Pair(student, teacher, 0.5)(tokens), far + 0.5 * apart)
    own, dense = text_loss(mine.logits, tokens), text_loss(theirs.logits, tokens)
    assert torch.equal(Pair(student, teacher, 0.5)(tokens, looking=True), torch.stack([far, own, dense]))
    assert torch.equal(Pair(student, None)(tokens), own)
    assert torch.equal(Pair(student, None)(tokens, looking=True), torch.stack([own, own, own]))


def mlp(keys: list[str], *more: str) -> dict[str, set[str]]:
    """What learns of two layers with these in each FFN: the last of `keys` is the value; `more` are its biases."""
    place = "model.layers.{}.mlp.{}"
    values = {place.format(at, name) for at in range(2) for name in (keys[-1], *more)}
    return {"values": values, "ffn": values | {place.format(at, name) for at in range(2) for name in keys}}


GATED = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
BIASED = ["gate_proj.bias", "up_proj.bias", *GATED]
GPT2 = {
    kind: {name.replace("model.layers", "transformer.h") for name in names}
    for kind, names in mlp(["c_fc.weight", "c_fc.bias", "c_proj.weight"], "c_proj.bias").items()
}
DENSE, SHARED = "model.layers.0.mlp.", "model.layers.1.mlp.shared_expert."
STACK = {"model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"}
MIXED = {
    "values": {f"{DENSE}down_proj.weight", f"{SHARED}down_proj.weight", "model.layers.1.mlp.experts.down_proj"},
    "ffn": {f"{place}{name}" for place in (DENSE, SHARED) for name in GATED} | STACK,
}
WHAT_LEARNS = {
    "llama": mlp(GATED),
    "llama-bias-tied": mlp(BIASED, "down_proj.bias"),
    "gpt2": GPT2,
    "family:qwen2_moe": MIXED,
    "family:gpt_oss": mlp(
        ["experts.gate_up_proj", "experts.gate_up_proj_bias", "experts.down_proj"], "experts.down_proj_bias"
    ),
}


@pytest.mark.parametrize("name", WHAT_LEARNS)
def test_what_learns(name: str) -> None:
    config = config_of(name)
    model, layout = tiny_model(config), find_layout(config)
    for train, names in WHAT_LEARNS[name].items():
        assert set(learning_names(model, layout, train)) == names
    everything = learning_names(model, layout, "all")
    assert sum(model.get_parameter(name).numel() for name in everything) == model.num_parameters()
    assert len({id(model.get_parameter(name)) for name in everything}) == len(everything)


def test_biases_that_a_refit_switched_on_learn_too() -> None:
    layout, slim = find_layout(tiny_config("llama")), tiny_model(tiny_config("llama", mlp_bias=True))
    assert set(learning_names(slim, layout, "values")) == mlp(BIASED, "down_proj.bias")["values"]
    assert set(learning_names(slim, layout, "ffn")) == mlp(BIASED, "down_proj.bias")["ffn"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "llama-bias-tied", "gpt2", "family:qwen2_moe"])
@pytest.mark.parametrize("train", ["values", "ffn", "all"])
def test_what_does_not_learn_is_the_teachers_own(train: str, name: str, dtype: torch.dtype) -> None:
    student, teacher = pupil(config_of(name), section(train=train), dtype)
    mine, theirs = (dict(model.named_parameters(remove_duplicate=False)) for model in (student.model, teacher))
    assert mine.keys() == theirs.keys()
    learning = {id(mine[name]) for name in student.trained}
    for key, parameter in mine.items():
        learns = id(parameter) in learning
        assert parameter.requires_grad == learns
        assert parameter.dtype == (torch.float32 if learns else dtype)
        assert (parameter is theirs[key]) != learns, key
    kept = {id(parameter): parameter.nbytes for parameter in mine.values() if id(parameter) not in learning}
    assert student.shared == sum(kept.values())
    assert not any(parameter.requires_grad for parameter in theirs.values())


def test_what_is_not_equal_is_not_shared() -> None:
    layout = find_layout(tiny_config("llama"))
    teacher, slim = tiny_model(tiny_config("llama")), tiny_model(tiny_config("llama", intermediate_size=40), seed=1)
    same = {"model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"}
    for name in same:
        slim.get_parameter(name).data.copy_(teacher.get_parameter(name))
    student = make_student(slim, layout, SECTION, teacher)
    assert {name for name, mine in slim.named_parameters() if mine is teacher.get_parameter(name)} == same
    assert student.shared == sum(teacher.get_parameter(name).nbytes for name in same)


@pytest.mark.parametrize(("name", "turned"), [("llama", False), ("gpt2", True)])
def test_adapters_add_their_scaled_product(name: str, turned: bool) -> None:
    config, tokens, state = config_of(name), random_tokens(2), torch.get_rng_state()
    model, layout = tiny_model(config), find_layout(config)
    torch.set_rng_state(state)
    before = copy.deepcopy(model)
    adapted = with_adapters(model, layout, section(train="lora", rank=3, seed=5))
    assert torch.equal(torch.get_rng_state(), state)  # others draw what they would have
    with torch.no_grad():
        assert torch.equal(adapted(tokens).logits, before(tokens).logits)  # they start with nothing
        for key, parameter in adapted.named_parameters():
            if ".lora_B." in key:
                parameter.copy_(torch.randn_like(parameter) * 0.05)
        pairs = {key: parameter.clone() for key, parameter in adapted.named_parameters() if parameter.requires_grad}
        expected = adapted(tokens).logits
        whole = merged(adapted)
        assert torch.allclose(whole(tokens).logits, expected, atol=1e-5 * float(expected.abs().max()))
    changed = changed_weights(pairs)
    inside = [layer + "." for layer in layout.layers]
    linear = [key for key, value in before.named_parameters() if key.startswith(tuple(inside)) and value.ndim == 2]
    assert sorted(changed) == sorted(linear)
    assert 2 * len(changed) == len(pairs)
    for key, expected in before.named_parameters():
        place, found = f"base_model.model.{key.removesuffix('.weight')}", whole.get_parameter(key).detach()
        if key in changed:
            product = pairs[f"{place}.lora_B.default.weight"] @ pairs[f"{place}.lora_A.default.weight"]
            found = found - 2 * (product.T if turned else product)  # alpha is twice the rank
        assert torch.allclose(found, expected, atol=1e-6), key


def test_adapters_come_from_the_seed() -> None:
    def first(seed: int) -> Any:
        student, _ = pupil(tiny_config("llama"), section(train="lora", rank=2, seed=seed))
        return dict(student.model.named_parameters())[student.trained[0]]

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))


def by_hand(config: Any, how: Recover) -> tuple[list[float], float, dict[str, Tensor]]:
    """A training as a plain loop over whole steps: Adam, a cut gradient, a rate that goes up in 5 steps and down.

    Returns the loss of each step, that of the held-out tokens at the end, and what has been learned.
    """
    student, teacher = pupil(config, how)
    learning = [(name, dict(student.model.named_parameters())[name]) for name in student.trained]
    first, second = ([torch.zeros_like(parameter) for _, parameter in learning] for _ in range(2))
    losses = []
    for step, rows in enumerate(torch.split(random_tokens(how.steps * PER_STEP), PER_STEP)):
        mine, theirs = (model(rows, output_hidden_states=True) for model in (student.model, teacher))
        p, q = theirs.logits.log_softmax(2), mine.logits.log_softmax(2)
        states = zip(mine.hidden_states[1:], theirs.hidden_states[1:], strict=True)
        apart = torch.stack([((a - b).square().sum(2) / b.square().sum(2)).mean() for a, b in states]).mean()
        loss = (p.exp() * (p - q)).sum(2).mean() + how.hidden * apart
        losses.append(float(loss.detach()))
        gradients = torch.autograd.grad(loss, [parameter for _, parameter in learning])
        norm = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
        rate = how.learning_rate * min(1, (step + 1) / 5) * (1 + math.cos(math.pi * step / how.steps)) / 2
        for (_, parameter), m, v, gradient in zip(learning, first, second, gradients, strict=True):
            cut = gradient * min(1, 1 / norm)
            m.lerp_(cut, 0.1)
            v.lerp_(cut.square(), 0.05)
            scale = (v / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8
            parameter.data -= rate * m / (1 - 0.9 ** (step + 1)) / scale
    with torch.no_grad():
        held = course(how).held["held"]
        p, q = (model(held).logits.log_softmax(2) for model in (teacher, student.model))
    return losses, float((p.exp() * (p - q)).sum(2).mean()), {name: value.detach() for name, value in learning}


@pytest.mark.parametrize(("train", "hidden"), [("ffn", 0.0), ("values", 0.7), ("all", 0.0), ("lora", 0.0)])
def test_a_training_is_a_plain_loop(train: str, hidden: float, tmp_path: Path) -> None:
    config, how = tiny_config("llama"), section(train=train, hidden=hidden, rank=4 if train == "lora" else None)
    losses, held, expected = by_hand(config, how)
    for at, batch_size in enumerate((1, 3, 8)):
        curve, found = taught(config, tmp_path / str(at), how, batch_size=batch_size)
        assert curve.losses == pytest.approx(losses, abs=1e-5)
        first, *_, last = (look["texts"]["held"]["loss"] for look in curve.looks)
        assert last == pytest.approx(held, abs=1e-5)
        assert last < first
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.allclose(tensor, expected[name], atol=2e-4), name


def test_sequences_at_once_divide_a_processes_share() -> None:
    sizes = {
        (batch, count): course(batch_size=batch, ranks=Ranks(0, count)).micro for batch in (1, 3, 8) for count in (1, 2)
    }
    assert sizes == {(1, 1): 1, (1, 2): 1, (3, 1): 2, (3, 2): 2, (8, 1): 4, (8, 2): 2}
    course(ranks=Ranks(0, 4)).check()
    with pytest.raises(KvpruneError, match=r"^recover\.batch_tokens: 64 are 4 sequences, and 3 processes cannot share"):
        course(ranks=Ranks(0, 3)).check()


def test_a_teacher_stays_as_it_was(tmp_path: Path) -> None:
    student, teacher = pupil(tiny_config("llama"))
    were = copy.deepcopy(teacher.state_dict())
    teach(student, teacher, course(), Kept(tmp_path, {}))
    assert all(torch.equal(tensor, were[name]) for name, tensor in teacher.state_dict().items())
    mine = dict(student.model.named_parameters())
    assert all(parameter is mine[name] for name, parameter in teacher.named_parameters() if ".mlp." not in name)
    assert not any(torch.equal(mine[name], were[name]) for name in student.trained)


def noisy(name: str) -> Any:
    """A config whose model is random in train()."""
    changes = {"dropout", "hidden_dropout", "attention_dropout", "residual_dropout", "router_jitter_noise", "layerdrop"}
    config = config_of(name)
    for key in changes & set(vars(config)):
        setattr(config, key, 0.3)
    return config


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "family:opt", "family:falcon", "family:starcoder2", "family:mixtral"]
)
def test_checkpointing_changes_nothing_but_memory(name: str, tmp_path: Path) -> None:
    how = section(tokens=3 * PER_STEP * LENGTH, hidden=0.1, train="ffn")
    plain, expected = taught(noisy(name), tmp_path / "plain", how)
    curve, found = taught(noisy(name), tmp_path / "checkpointed", how, checkpointing=True, batch_size=2)
    assert curve.losses == pytest.approx(plain.losses, abs=1e-5)
    assert all(torch.allclose(tensor, expected[key], atol=1e-4) for key, tensor in found.items())


@pytest.mark.parametrize("again", [False, True])
def test_checkpointing_runs_a_layer_again(again: bool, tmp_path: Path) -> None:
    student, teacher = pupil(tiny_config("llama"))
    calls = list[bool]()
    student.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    teach(student, teacher, course(checkpointing=again), Kept(tmp_path, {}))
    assert calls.count(True) == STEPS * (1 + again)
    assert calls.count(False) == 5 * 3  # looks at three sequences, one by one


def test_of_another_training_nothing_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2), "a:step": torch.tensor(3.0)}
    kept = Kept(tmp_path / "kept", {"recipe": {"rate": 0.1}})
    assert kept.read("last") is None
    kept.save("last", tensors, {"curve": {"losses": [1.5, math.inf]}})
    found = kept.read("last")
    assert found is not None
    assert found[1] == {"curve": {"losses": [1.5, math.inf]}}
    assert all(torch.equal(found[0][name], tensor) for name, tensor in tensors.items())
    assert kept.read("best") is None
    assert Kept(tmp_path / "kept", {"recipe": {"rate": 0.2}}).read("last") is None
    kept.clear()
    assert not (tmp_path / "kept").exists()


# Several commands for one start of the processes, each at a port of its own. Some are stopped before a step.
SEVERAL = """
import json, os, sys
from kvprune.cli import main
from kvprune.teaching import training

training.SECONDS_BETWEEN_SAVES, real = 0, training.take_step
for port, stop, arguments in json.loads(sys.argv[1]):
    def take_step(work, step, stop=stop):
        if step == stop:
            raise KeyboardInterrupt
        return real(work, step)

    training.take_step = take_step
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    if main(arguments) != (0 if stop is None else 130):
        sys.exit(1)
"""


def test_two_processes_teach_what_one_teaches(tmp_path: Path) -> None:
    cases: dict[str, tuple[str, list[str]]] = {
        "ffn": ("llama", ["--batch-size", "1"]),
        "lora": ("llama", ["--checkpointing"]),
        "all": ("family-gemma3", []),  # of which a part sees, and is not used
    }
    commands, alone = list[tuple[int | None, list[str]]](), {}
    for train, (shape, how) in cases.items():
        run = exported(tmp_path, shape, name=train)
        command = ["recover", str(run.path), "--set", "recover.method=distill", "--set", f"recover.train={train}", *how]
        commands += [(5, command)] * (train == "lora") + [(None, command)]
        alone[train] = recover(exported(tmp_path, shape, name=f"{train}-alone"), train=train)
    (tmp_path / "several.py").write_text(SEVERAL)
    ports = free_ports(len(commands))
    arguments = json.dumps([[port, *what] for port, what in zip(ports, commands, strict=True)])
    done = torchrun(2, tmp_path / "several.py", arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("recover: going on after 5 of 8 steps") == 1
    for train, expected in alone.items():
        run, other = RunFolder(tmp_path / train), RunFolder(tmp_path / f"{train}-alone")
        found = json.loads(run.recovered.read_text())
        assert found["provenance"]["run"]["processes"] == 2
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-4)
        assert found["best"] == expected["best"] > 0
        for name, tensor in weights(run).items():
            assert torch.allclose(tensor, weights(other)[name], atol=1e-4), name
        assert not run.recovering.exists()
