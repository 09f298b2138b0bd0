"""Ask for an answer within a bound on accuracy loss, with OpenAI's own client.

    python examples/bounds.py --file book.txt "Who is the thief?"

The server chooses the attention: exact, or sparse as far as measurements of the model allow. The
extension `csps` of the answer says what it has chosen, and why.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from openai import OpenAI


def main() -> None:
    """Send the question twice: exactly, and within the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--file", type=Path, help="text that the question is about")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--max-accuracy-loss", type=float, default=0.01)
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
    model = client.models.list().data[0].id
    text = f"{arguments.file.read_text()}\n\n" if arguments.file else ""
    bounds = {"objective": "ttft", "max_accuracy_loss": arguments.max_accuracy_loss}
    for wanted in ({"attention": "exact"}, bounds):
        completion = client.completions.create(
            model=model,
            prompt=f"{text}Question: {arguments.question}\nAnswer:",
            max_tokens=32,
            temperature=0,
            extra_body={"csps": {**wanted, "explain": True}},
        )
        assert completion.usage is not None
        plan = (completion.model_extra or {})["csps"]["plan"]
        print(f"{wanted}: {completion.choices[0].text.strip()!r}")
        print(f"  {completion.usage.prompt_tokens} tokens, {plan['attention']}: {plan['reason']}")


if __name__ == "__main__":
    main()
