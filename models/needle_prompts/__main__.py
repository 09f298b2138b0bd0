"""Print a prompt with facts hidden in long filler text, and the answer to its question.

Run ``python -m csps.models.needle_prompts --length 16384 --needles 4 --kind multi_key``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from csps.models.needle_prompts.filler import FILLER_KINDS
from csps.models.needle_prompts.haystack import KINDS, ORDERS
from csps.models.needle_prompts.prompt import NeedleConfig, NeedlePrompt, generate


def main(argv: Sequence[str] | None = None) -> None:
    """Print a prompt; `argv` replaces the process's own arguments."""
    arguments = _parse(argv)
    prompt = generate(
        NeedleConfig(
            length=arguments.length,
            kind=arguments.kind,
            needles=arguments.needles,
            depth=arguments.depth,
            filler=arguments.filler,
            order=arguments.question,
            seed=arguments.seed,
        )
    )
    if arguments.json:
        print(json.dumps(_described(prompt)))
    else:
        print(prompt.text)
        print(f"\n[{prompt.tokens} tokens; expected answer: {prompt.answer}]")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m csps.models.needle_prompts",
        description="Print a prompt with facts hidden in filler text, and its answer.",
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--kind", choices=KINDS, default="multi_key")
    parser.add_argument("--needles", type=int, default=4, help="facts, distractors included")
    parser.add_argument(
        "--depth", type=float, help="of the fact asked for, 0 to 1; default: random"
    )
    parser.add_argument(
        "--filler",
        metavar="KIND|FILE",
        default="sentences",
        help=f"{', '.join(FILLER_KINDS)}, or a text file; real text is measured in words",
    )
    parser.add_argument("--question", choices=ORDERS, default="last", help="where it stands")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="as JSON, with the positions")
    return parser.parse_args(argv)


def _described(prompt: NeedlePrompt) -> dict[str, object]:
    """Return a JSON-ready description with the positions of the needles asked for."""
    return {
        "prompt": prompt.text,
        "answer": prompt.answer,
        "tokens": prompt.tokens,
        "needles": [
            {
                "key": needle.key,
                "value": needle.value,
                "depth": round(needle.depth, 4),
                "chars": needle.chars,
                "tokens": needle.words,
            }
            for needle in prompt.asked
        ],
    }


if __name__ == "__main__":
    main()
