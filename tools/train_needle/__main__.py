"""Train the small default model, which finds needles in long text.

Seven ideas make this work on one CPU core within an hour:

1. *Copy first.* Training on retrieval alone stays for thousands of steps at "any value of the
   context". Copying shuffled segments of random words teaches the two-layer circuit (look at the
   previous word; find what followed this word) within some hundred steps.
2. *Then hints.* After copying, retrieval still falls back to "any value": every value follows the
   same "is". For a while the value is therefore asked for already at the key in the question, and
   at each word from there to the answer. At the key only the look-up is to be learned: 250 steps.
3. *Pretend to be long.* A 64K-token text is hard because of the number of words that compete for
   attention, and of the distances between them. A short text can have both: positions skip at
   random between sentences (PoSE), and each filler word's attention logit is raised by ln(R), the
   weight of R copies of it. A 500-token text then costs as much attention as any length.
4. *Many questions to one text.* Each question stands behind the text as if it were alone: it sees
   the text and itself, never another question. Intermediate layers must answer as well (deep
   supervision), so that retrieval happens in several layers, not only in the last one.
5. *Many kinds of text.* Generated sentences, the same about keys and values, shuffled words,
   English and programs of the installed packages, and English in other scripts, byte by byte, with
   questions before the text as well as behind it. If one fact has many look-alikes, the raised
   logits make every lapse count as often as in a long text.
6. *Recall, then look up.* A question before the text is far from its answer: its key must be
   recalled before it can be looked up. That needs a look-up behind the layer that recalls, and none
   emerges, because the second layer answers everything else. So the first layer that answers is
   asked for the key, and the next one starts as a copy of it: 200 steps.
7. *See every key.* No head of the first layer attends to some keys, and their facts are confused
   for good: nearly no attention has nearly no gradient. Its logarithm has one. A long text also has
   many facts, so those that a question does not ask for count several times.

Run ``python -m csps.tools.train_needle --out DIR``; the same command resumes an interrupted run.
``--recipe deep`` trains a second model of eight layers by the first seven stages, which answers
questions behind the text.

Batches depend on seed, stage and step alone, and on the texts of the packages, whose digest is
printed first. A resumed run sees the same batches as an uninterrupted one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from csps.tools.train_needle.stages import RECIPES
from csps.tools.train_needle.texts import installed_texts
from csps.tools.train_needle.trainer import Trainer, plot_log


def main(argv: Sequence[str] | None = None) -> None:
    """Train; `argv` replaces the process's own arguments."""
    arguments = _parse(argv)
    torch.set_num_threads(arguments.threads)
    texts = installed_texts()
    print(f"texts={texts.digest}", flush=True)
    trainer = Trainer(arguments.out, arguments.seed, texts, RECIPES[arguments.recipe])
    trainer.train()
    if arguments.plot:
        plot_log(trainer.rows, arguments.plot)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m csps.tools.train_needle")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        default="needle",
        help="deep: eight layers, questions behind the text only (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve here when done")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
