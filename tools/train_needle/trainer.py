"""Run the training loop, resume it after an interruption, and log its means and its curve."""

from __future__ import annotations

import csv
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from csps.tools.train_needle.batch_maker import BatchMaker

# Importing the name also registers the attention with transformers.
from csps.tools.train_needle.loss import ATTENTION_NAME, loss_and_accuracy, overlooked
from csps.tools.train_needle.model import build_model, build_tokenizer, save_checkpoint
from csps.tools.train_needle.stages import RECIPES, Recipe, Stage, schedule
from csps.tools.train_needle.texts import TrainingTexts

Row = dict[str, Any]
"""Line of the log: step, stage, and the means of a `Window`."""


class Window:
    """Losses and accuracies since the last line of the log."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._losses: list[float] = []
        self._accuracies: list[float] = []

    def add(self, loss: float, accuracy: float) -> None:
        """Add the result of a training step."""
        self._losses.append(loss)
        self._accuracies.append(accuracy)

    def means(self) -> dict[str, float]:
        """Return mean loss, mean accuracy, and the seconds they took."""
        return {
            "loss": round(fmean(self._losses), 4),
            "accuracy": round(fmean(self._accuracies), 4),
            "seconds": round(time.monotonic() - self._start, 1),
        }


def write_log(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as CSV; write nothing without rows."""
    if not rows:
        return
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plot_log(rows: Sequence[Row], path: Path) -> None:
    """Draw the accuracy on training questions, stage by stage."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for stage in dict.fromkeys(row["stage"] for row in rows):
        stage_rows = [row for row in rows if row["stage"] == stage]
        steps = [row["step"] for row in stage_rows]
        axis.plot(steps, [row["accuracy"] for row in stage_rows], marker=".", label=stage)
    axis.set_xlabel("step")
    axis.set_ylabel("fraction of answer words predicted right")
    axis.set_ylim(0, 1.02)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


class Trainer:
    """Owner of what a checkpoint saves: model, optimizer, step and log."""

    def __init__(
        self, out: Path, seed: int, texts: TrainingTexts, recipe: Recipe = RECIPES["needle"]
    ) -> None:
        self.out = out
        self.recipe = recipe
        self.tokenizer = build_tokenizer()
        torch.manual_seed(seed)
        self.model = build_model(self.tokenizer, recipe.architecture)
        self.model.set_attn_implementation(ATTENTION_NAME)
        self.batches = BatchMaker(self.tokenizer, seed, texts)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.step = 0
        self.rows: list[Row] = []
        out.mkdir(parents=True, exist_ok=True)
        if self._state_file.exists():
            self._resume()

    @property
    def _state_file(self) -> Path:
        return self.out / "training_state.pt"

    def _resume(self) -> None:
        state = torch.load(self._state_file, weights_only=True)
        if state.get("recipe") != repr(self.recipe):
            raise ValueError(f"{self._state_file} is of another recipe; name another folder")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.rows = state["step"], json.loads(state["rows"])

    def save(self) -> None:
        """Save the training state for resuming, and checkpoint and log for use."""
        state = {
            "recipe": repr(self.recipe),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "rows": json.dumps(self.rows),
        }
        partial = self._state_file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._state_file)
        save_checkpoint(self.model, self.tokenizer, self.out / "checkpoint")
        write_log(self.rows, self.out / "log.csv")

    def train(
        self, *, until: int | None = None, log_every: int = 50, save_every: int = 100
    ) -> None:
        """Continue from the current step to the run's end, or to a step of it."""
        self.model.train()
        window = Window()
        for total, stage, step in itertools.islice(schedule(self.recipe.stages), self.step, until):
            if step == 0 and stage.second_look_up:
                self._copy_look_up()
            window.add(*self._update(stage, step))
            self.step = total + 1
            if self.step % log_every == 0:
                self._log(stage, window)
                window = Window()
            if self.step % save_every == 0:
                self.save()
        self.save()

    def _copy_look_up(self) -> None:
        """Copy the second layer's attention, which learned to look up by copying, to the third."""
        source, target = self.model.model.layers[1:3]
        for name in ("input_layernorm", "self_attn"):
            copied, into = getattr(source, name), getattr(target, name)
            into.load_state_dict(copied.state_dict())
            for old, new in zip(copied.parameters(), into.parameters(), strict=True):
                state = self.optimizer.state.get(old, {})
                self.optimizer.state[new] = {key: value.clone() for key, value in state.items()}

    def _log(self, stage: Stage, window: Window) -> None:
        row: Row = {"step": self.step, "stage": stage.name, **window.means()}
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        self.rows.append(row)

    def _update(self, stage: Stage, step: int) -> tuple[float, float]:
        first, last = stage.learning_rate
        rate = first + (last - first) * step / stage.steps
        for group in self.optimizer.param_groups:
            group["lr"] = rate * min(1.0, (self.step + 1) / 50)
        # Half the time on a core that multiplies in bfloat16, and weights that tolerate it.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, accuracy = loss_and_accuracy(
                self.model,
                self.batches.draw(stage, step),
                self.recipe.architecture.answers_every,
            )
            if stage.look_back:
                loss = loss + overlooked(self.model, self.batches.facts(stage, step))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), accuracy
