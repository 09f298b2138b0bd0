"""Questions put to a model in this process, which computes each haystack once.

With kind ``single`` the needles not asked for are dropped from the KV that the question sees, so it
finds one needle only, however many questions share the haystack.
"""

from __future__ import annotations

from collections.abc import Sequence

from csps.models.needle_prompts.haystack import Haystack
from csps.models.needle_prompts.questions import Question
from csps.services.evaluation.local_model import LocalModel, Span


class LocalAnswerer:
    """Computes each question behind the KV of its haystack, as if no other had been asked."""

    def __init__(self, model: LocalModel) -> None:
        self.model = model

    def answers(self, haystack: Haystack, questions: Sequence[Question]) -> list[str]:
        """The replies, in the order of the questions."""
        context = self.model.read(haystack.text)
        spans = needle_tokens(self.model, haystack)
        replies: list[str] = []
        for question in questions:
            seen = context
            if question.kind == "single" and len(spans) > 1:
                seen = context.without(
                    span for i, span in enumerate(spans) if i not in question.needles
                )
            replies.append(self.model.answer(seen, question.completion_text))
        return replies


def needle_tokens(model: LocalModel, haystack: Haystack) -> list[Span]:
    """Where the needles lie in the KV of a haystack."""
    return model.tokens_of(haystack.text, [needle.chars for needle in haystack.needles])
