"""The training itself, on accelerate: one process, several by DDP, or FSDP, as the launcher says.

Of a step's sequences every process takes its share, in equal micro-batches, so that the gradient is the mean over all
tokens of the step however they are split. Losses on held-out text before, during and after choose the point that stays.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from kvprune.errors import KvpruneError
from kvprune.ffn.forwards import saved_when_stopped
from kvprune.progress import advancing, log
from kvprune.ranks import Ranks
from kvprune.schema import Recover
from kvprune.sources.models import is_out_of_memory, one_line
from kvprune.teaching.kept import Kept
from kvprune.teaching.pair import Pair
from kvprune.teaching.students import Student, lighter

BETAS = (0.9, 0.95)
WARM_UP = 5  # steps
LARGEST_NORM = 1.0  # of a gradient: longer ones are cut to it
LOOKS = 4  # at held-out text while it trains, the last of them at the end
SECONDS_BETWEEN_SAVES = 180.0
DIVERGED = 2.0  # the loss of the last steps over that of the first ones
SMALL = 0.01  # nats a token: below it a loss may double and mean nothing
LAST = "last"  # what the last step is called
FEW = 5  # how many steps that is


@dataclass(frozen=True)
class Course:
    """What is taught, and how it is run."""

    section: Recover
    tokens: Tensor  # int64 [sequences, tokens], whole steps of them, in the order of training
    held: dict[str, Tensor]  # int64 [sequences, tokens] of each held-out text
    dtype: str  # float32; or bfloat16, in which products are taken, and all is held that does not learn
    batch_size: int  # sequences at once, at most
    device: str
    ranks: Ranks
    checkpointing: bool = False
    split: bool = False  # whether models are split over the processes (FSDP): then nothing is shared between two

    @property
    def loaded_on(self) -> str:
        """Where models are loaded: one that is to be split may be too large for the device."""
        return "cpu" if self.split else self.device

    @property
    def per_step(self) -> int:
        """Sequences."""
        return self.section.batch_tokens // self.section.sequence_length

    @property
    def steps(self) -> int:
        return len(self.tokens) // self.per_step

    @property
    def micro(self) -> int:
        """Sequences at once: as many as allowed that divide a process's share of a step."""
        share = max(self.per_step // self.ranks.count, 1)
        return max(size for size in range(1, share + 1) if share % size == 0 and size <= self.batch_size)

    def check(self) -> None:
        """Raise KvpruneError where the processes cannot share a step's sequences alike."""
        if self.per_step % self.ranks.count:
            raise KvpruneError(
                f"recover.batch_tokens: {self.section.batch_tokens} are {self.per_step} sequences, and "
                f"{self.ranks.count} processes cannot share them alike; choose a multiple"
            )


@dataclass
class Curve:
    """How a training went: a loss for every step, in nats a token, and looks at the held-out texts."""

    losses: list[float] = field(default_factory=list)
    looks: list[dict[str, Any]] = field(default_factory=list)  # step, and what `_seen` says of each text
    seconds: float = 0.0
    stopped: str = ""  # why it ended early

    @property
    def best(self) -> int:
        """The step of the look with the lowest mean loss over the texts; 0 is before training."""
        return int(min(self.looks, key=mean_loss)["step"])


def mean_loss(look: dict[str, Any]) -> float:
    """Over the texts of a look; inf where one is not finite."""
    mean = math.fsum(seen["loss"] for seen in look["texts"].values()) / len(look["texts"])
    return mean if math.isfinite(mean) else math.inf


def teach(student: Student, teacher: Any | None, course: Course, kept: Kept) -> Curve:
    """Train the `student`. What it knew at its best is in `kept` (`best_name`), unless that was before training."""
    work = prepare(student, teacher, course, kept)
    curve = _resumed(work) or Curve()
    started = time.monotonic() - curve.seconds
    total, done = course.tokens.numel(), len(curve.losses)

    def save() -> None:
        curve.seconds = time.monotonic() - started
        _keep(work, LAST, curve)

    if not curve.looks:
        with _named(work, 0):
            _look(work, curve)
        if math.isinf(mean_loss(curve.looks[0])):
            raise KvpruneError(f"recover: before training the loss is not finite in {course.dtype}; try dtype: float32")
    with (
        advancing(total=total - done * course.section.batch_tokens, label="recover", unit="tokens") as advance,
        _saving(save, course.ranks) as tick,
    ):
        for step in range(done, course.steps):
            if curve.stopped:
                break
            with tick(), _named(work, step):
                loss = take_step(work, step)
                curve.losses.append(loss)
                curve.stopped = _trouble(curve.losses)
                if not curve.stopped and _is_time(step + 1, course.steps):
                    _look(work, curve)
            advance(course.section.batch_tokens, f"loss {loss:.4f}")
    save()
    return curve


@dataclass(frozen=True)
class Work:
    course: Course
    accelerator: Accelerator
    pair: Any
    optimizer: Any
    learning: dict[str, nn.Parameter]
    kept: Kept
    has_teacher: bool


def prepare(student: Student, teacher: Any | None, course: Course, kept: Kept) -> Work:
    count = course.ranks.count
    if course.checkpointing:
        _checkpoint(student.layers)
    if ":" in course.device:
        torch.cuda.set_device(course.device)  # a process alone would be put on the first GPU
    AcceleratorState._reset_state(reset_partial_state=True)  # of a training before, of another type or device
    accelerator = Accelerator(
        cpu=course.device == "cpu",
        mixed_precision="bf16" if course.dtype == "bfloat16" else "no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=course.per_step // count // course.micro),
        # All of a model may be more than what reads a text.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=course.section.train == "all")],
    )
    if plugin := getattr(accelerator.state, "fsdp_plugin", None):
        _refine(plugin)
    pair = Pair(student.model, teacher, course.section.hidden, student.layers)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in pair.parameters() if parameter.requires_grad],
        lr=course.section.learning_rate,
        betas=BETAS,
        weight_decay=0.0,
    )
    pair, optimizer = accelerator.prepare(pair, optimizer)
    there = dict(accelerator.unwrap_model(pair).student.named_parameters())
    return Work(
        course,
        accelerator,
        pair,
        optimizer,
        {name: there[name] for name in student.trained},
        kept,
        teacher is not None,
    )


def _refine(plugin: Any) -> None:
    """Have FSDP give losses, and sum gradients, in float32: it would round both to the type that products are in."""
    if plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(
            plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None
        )


def _checkpoint(layers: Iterable[nn.Module]) -> None:
    """Keep only what goes into a layer, and run it again backwards.

    transformers' own checkpointing works in train() alone, which would switch on dropout, layerdrop and router noise.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def take_step(work: Work, step: int) -> float:
    """Train one step. Returns its loss, the mean over its tokens on all processes."""
    course = work.course
    rows = course.tokens[step * course.per_step : (step + 1) * course.per_step]
    total = torch.zeros((), dtype=torch.float64)
    for batch in torch.split(rows[course.ranks.rank :: course.ranks.count], course.micro):
        with work.accelerator.accumulate(work.pair):
            loss = work.pair(batch.to(work.accelerator.device))
            work.accelerator.backward(loss / batch.numel())
        total += loss.detach().double().cpu()
    for group in work.optimizer.param_groups:
        group["lr"] = course.section.learning_rate * _share_of_rate(step, course.steps)
    work.accelerator.clip_grad_norm_(work.learning.values(), LARGEST_NORM)
    work.optimizer.step()
    work.optimizer.zero_grad()
    course.ranks.sum(total)
    return float(total) / rows.numel()


@contextmanager
def _named(work: Work, step: int) -> Iterator[None]:
    """Say in one line that memory ran out, with the knobs, or that the device failed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            course = work.course
            ways = lighter(course.section, course.micro, whole=not course.checkpointing)
            raise KvpruneError(f"recover: out of memory with {course.micro} sequences at once; use {ways}") from None
        if work.course.device != "cpu" and ("CUDA" in str(error) or "NCCL" in str(error)):
            raise KvpruneError(
                f"recover: {work.course.device} failed in step {step + 1}: {one_line(error)}; the same command goes on "
                "from the last step that was kept"
            ) from None
        raise


def _share_of_rate(step: int, steps: int) -> float:
    """Up over the first steps, and down along half a cosine."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _trouble(losses: list[float]) -> str:
    """Why the training has to stop, or ""."""
    if not math.isfinite(losses[-1]):
        return f"the loss of step {len(losses)} is not finite"
    first, last = (math.fsum(some) / FEW for some in (losses[:FEW], losses[-FEW:]))
    if len(losses) >= 2 * FEW and last > DIVERGED * max(first, SMALL):
        return f"the loss diverges: {first:.3g} in the first {FEW} steps, {last:.3g} up to step {len(losses)}"
    return ""


def _is_time(step: int, steps: int) -> bool:
    return step in {round(steps * part / LOOKS) for part in range(1, LOOKS + 1)}


def _look(work: Work, curve: Curve) -> None:
    """Measure the losses on the held-out texts, and keep the student where it was never better."""
    step = len(curve.losses)
    texts = {name: _seen(work, tokens) for name, tokens in work.course.held.items()}
    curve.looks.append({"step": step, "texts": texts})
    before = curve.looks[0]["texts"]
    told = ", ".join(f"{name} {seen['loss']:.4f} (at first {before[name]['loss']:.4f})" for name, seen in texts.items())
    log.info("recover: step %d of %d: held-out loss: %s", step, work.course.steps, told)
    if step and curve.best == step:
        # The best point and the last step go together: what is resumed must find the point that its looks tell of.
        _keep(work, best_name(step), curve)
        _keep(work, LAST, curve)
        if work.course.ranks.first:
            work.kept.drop_all_but(LAST, best_name(step))


def best_name(step: int) -> str:
    """What the best point is called, where it is that of `step`."""
    return f"best-{step}"


@torch.no_grad()
def _seen(work: Work, tokens: Tensor) -> dict[str, float]:
    """On `tokens` `[sequences, tokens]`: how far slim is from dense, and how well each of them predicts the text.

    In nats a token, predicted ones for a text. Without a teacher, slim alone, thrice.
    """
    ranks, total = work.course.ranks, torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(tokens), ranks.count):  # every process runs as often as the others: FSDP waits for all
        mine = start + ranks.rank
        found = work.pair(tokens[min(mine, len(tokens) - 1)][None].to(work.accelerator.device), looking=True)
        total += found.double().cpu() * (mine < len(tokens))
    ranks.sum(total)
    loss, slim, dense = (total / len(tokens)).tolist()
    predicted = tokens.shape[1] - 1
    taught = tokens.shape[1] if work.has_teacher else predicted
    return {"loss": loss / taught, "slim": slim / predicted, "dense": dense / predicted}


def _keep(work: Work, name: str, curve: Curve) -> None:
    """Write what has been learned, as `last` with what the optimizer knows. All processes gather, the first writes."""
    parts = {key: parameter.detach() for key, parameter in work.learning.items()}
    if name == LAST:
        for key, parameter in work.learning.items():
            state = work.optimizer.state.get(parameter, {})
            parts |= {f"{key}:{item}": value for item, value in state.items()}
    first = work.course.ranks.first
    wholes = ((key, _whole(part)) for key, part in parts.items())
    tensors = {key: whole.cpu().contiguous() for key, whole in wholes if first}
    if first:
        work.kept.save(name, tensors, {"curve": vars(curve)})


def _resumed(work: Work) -> Curve | None:
    """Put the pair and the optimizer where a training that was stopped left them."""
    found = work.kept.read(LAST) if work.course.ranks.first else None
    about = work.course.ranks.data_of_first(found[1] if found else None)
    if about is None:
        return None
    tensors = found[0] if found else {}
    names = work.course.ranks.data_of_first(list(tensors))
    for name in names:
        tensor = work.course.ranks.tensor_of_first(tensors.get(name))
        key, _, item = name.partition(":")
        parameter = work.learning[key]
        if item:
            work.optimizer.state[parameter][item] = tensor if item == "step" else _like(parameter, tensor)
        else:
            with torch.no_grad():
                parameter.copy_(_like(parameter, tensor))
    curve = Curve(**about["curve"])
    log.info("recover: going on after %d of %d steps", len(curve.losses), work.course.steps)
    return curve


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(kind: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, split over the processes and on the device as `kind` is."""
    if isinstance(kind, DTensor):
        return distribute_tensor(tensor.to(kind.device), kind.device_mesh, kind.placements)
    return tensor.to(kind.device)


@contextmanager
def _saving(save: Callable[[], None], ranks: Ranks) -> Iterator[Callable[[], Any]]:
    """Save every few minutes; alone on Ctrl-C too, after the step in hand."""
    if ranks.count == 1:
        with saved_when_stopped(save, SECONDS_BETWEEN_SAVES) as tick:
            yield tick
        return
    saved = time.monotonic()

    @contextmanager
    def together() -> Iterator[None]:
        nonlocal saved
        yield
        if ranks.data_of_first(time.monotonic() - saved > SECONDS_BETWEEN_SAVES):
            save()
            saved = time.monotonic()

    yield together
