"""Teacher and student: one module, so that an engine prepares both at once, and the losses between them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

ROWS = 128  # tokens whose float32 distributions are held at once


class Pair(nn.Module):
    """The dense model beside the slim one. Where the teacher is None, the student learns the text itself."""

    def __init__(self, student: Any, teacher: Any, hidden: float = 0.0, layers: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.student, self.teacher, self.hidden = student, teacher, hidden
        self._no_split_modules = sorted({type(layer).__name__ for layer in layers})  # what FSDP gathers one by one

    def forward(self, tokens: Tensor, looking: bool = False) -> Tensor:
        """The loss over `tokens` `[sequences, tokens]`, in nats, summed over tokens; `looking`, what `_look` says."""
        if looking:
            return self._look(tokens)
        mine = self.student(input_ids=tokens, use_cache=False, output_hidden_states=self.hidden > 0)
        if self.teacher is None:
            return text_loss(mine.logits, tokens)
        with torch.no_grad():
            theirs = self.teacher(input_ids=tokens, use_cache=False, output_hidden_states=self.hidden > 0)
        loss = divergence(mine.logits, theirs.logits)
        if self.hidden > 0:
            loss = loss + self.hidden * distance(mine.hidden_states, theirs.hidden_states)
        return loss

    def tie_weights(self) -> None:
        """Tie both again: FSDP parts what is tied where one process alone has loaded them, and then asks for this."""
        for model in (self.student, self.teacher):
            if model is not None:
                model.tie_weights()

    @torch.no_grad()
    def _look(self, tokens: Tensor) -> Tensor:
        """Of `tokens`, summed, in nats: how far the student is from the teacher, and how well each predicts them."""
        mine = self.student(input_ids=tokens, use_cache=False).logits
        own = text_loss(mine, tokens)
        if self.teacher is None:
            return torch.stack([own, own, own])
        theirs = self.teacher(input_ids=tokens, use_cache=False).logits
        return torch.stack([divergence(mine, theirs), own, text_loss(theirs, tokens)])


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Σ over tokens of KL(teacher ‖ student) of the next-token distributions, from logits `[sequences, tokens, words]`.

    Hinton et al. 2015 (arXiv:1503.02531) at temperature 1. Only the student learns by it.
    """
    total: Tensor = _Divergence.apply(student, teacher)  # type: ignore[no-untyped-call]
    return total


class _Divergence(torch.autograd.Function):
    """The slope, p(student) - p(teacher), is found along with the loss: float32 copies are of a few tokens only.

    Autograd would keep those of all tokens, and take five times as long.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        slope = student.new_empty(student.shape) if ctx.needs_input_grad[0] else None
        total = student.new_zeros((), dtype=torch.float64)
        parts = (torch.split(logits.flatten(0, 1), ROWS) for logits in (student, teacher))
        for at, (mine, theirs) in enumerate(zip(*parts, strict=True)):
            expected, found = theirs.float().log_softmax(1), mine.float().log_softmax(1)
            share = expected.exp()
            if slope is not None:
                slope.flatten(0, 1)[at * ROWS : (at + 1) * ROWS] = found.exp() - share
            total += (expected - found).mul_(share).sum(dtype=torch.float64)
        ctx.save_for_backward(slope)
        return total.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0].mul_(outer), None


def text_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Σ over tokens but each sequence's first of -ln p, from logits `[sequences, tokens, words]`."""
    total = logits.new_zeros((), dtype=torch.float32)
    for mine, ids in zip(logits, tokens, strict=True):
        total = total + nn.functional.cross_entropy(mine[:-1].float(), ids[1:], reduction="sum")
    return total


def distance(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...]) -> Tensor:
    """Σ over tokens of the squared distance of hidden states relative to the teacher's squares, mean over layers."""
    total = torch.zeros((), device=student[0].device)
    for mine, theirs in zip(student[1:], teacher[1:], strict=True):
        square = theirs.float().square().sum(2).clamp(min=1e-12)
        total = total + ((mine.float() - theirs.float()).square().sum(2) / square).sum()
    return total / (len(student) - 1)
