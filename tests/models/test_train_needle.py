"""Training of the default model: reproducible, resumable, and what a batch may see."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from csps.models.train_needle.architecture import build_model
from csps.models.train_needle.batch_maker import BatchMaker
from csps.models.train_needle.loss import layer_logits
from csps.models.train_needle.stages import STAGES, Stage
from csps.models.train_needle.tokenizer import build_tokenizer
from csps.models.train_needle.trainer import Trainer

TINY = Stage(name="tiny", steps=4, batch=2, tokens=64, needles=(1, 3), questions=3, hard_kinds=0.3)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_same_seed_same_batch(stage: Stage) -> None:
    small = replace(stage, batch=2)
    one, same = (BatchMaker(build_tokenizer(), seed=0).draw(small, 7) for _ in range(2))
    other = BatchMaker(build_tokenizer(), seed=1).draw(small, 7)
    assert torch.equal(one.ids, same.ids)
    assert torch.equal(one.mask, same.mask)
    assert one.ids.shape != other.ids.shape or not torch.equal(one.ids, other.ids)


def test_positions_increase_within_what_a_question_sees() -> None:
    tokenizer = build_tokenizer()
    batch = BatchMaker(tokenizer, seed=0).draw(TINY, 0)
    for ids, positions, mask in zip(batch.ids, batch.positions, batch.mask[:, 0], strict=True):
        for row in mask[ids != tokenizer.pad_token_id]:
            seen = positions[row > -torch.inf]
            assert torch.all(seen[1:] > seen[:-1])


def test_a_question_does_not_see_another_one() -> None:
    tokenizer = build_tokenizer()
    batch = BatchMaker(tokenizer, seed=0).draw(replace(TINY, batch=1), 0)
    (ends,) = torch.where(batch.ids[0] == tokenizer.eos_token_id)
    last = batch.mask[0, 0, ends[-1]]
    assert (last[ends[:-1]] == -torch.inf).all()


def test_a_raised_logit_weighs_as_much_as_copies() -> None:
    """What makes a short text pretend to be long, checked on a text that is really repeated."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 8), torch.randn(5, 8), torch.randn(5, 8)
    copies = torch.tensor([1, 7, 7, 1, 7])
    repeated = torch.softmax(q @ k.repeat_interleave(copies, 0).T, -1)
    raised = torch.softmax(q @ k.T + copies.log(), -1)
    expected = repeated @ v.repeat_interleave(copies, 0)
    torch.testing.assert_close(raised @ v, expected)


def test_each_later_layer_answers() -> None:
    tokenizer = build_tokenizer()
    batch = BatchMaker(tokenizer, seed=0).draw(TINY, 0)
    with torch.no_grad():
        logits = layer_logits(build_model(tokenizer), batch)
    assert [each.shape for each in logits] == [(len(batch.targets), len(tokenizer))] * 3


def test_an_interrupted_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = Trainer(tmp_path / "whole", seed=3, stages=(TINY,))
    whole.train()
    half = Trainer(tmp_path / "half", seed=3, stages=(TINY,))
    half.train(until=2)
    resumed = Trainer(tmp_path / "half", seed=3, stages=(TINY,))
    assert resumed.step == 2
    resumed.train()
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)
