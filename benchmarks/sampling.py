"""Cost of sampling the next tokens of a batch, by the requests' sampling options.

    python benchmarks/sampling.py [--vocab 151936] [--rows 16] [--repeats 15]

For each kind of request: milliseconds of processor time for a batch of that kind, and for one such
request among greedy ones. Torch uses one thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence

import torch

from csps.actors.sampling.batch_sampler import sample_batch
from csps.actors.sampling.token_sampler import TokenSampler
from csps.protocols.gang.messages import Sampling

GREEDY = Sampling(temperature=0.0, max_tokens=1 << 30)


def kinds(vocab: int) -> dict[str, Sampling]:
    """Return the sampling options to measure, with the costly ones."""
    everything = tuple(range(1, vocab))
    return {
        "greedy": GREEDY,
        "random": Sampling(max_tokens=1 << 30),
        "top-k 20": Sampling(top_k=20, max_tokens=1 << 30),
        "top-p 0.9": Sampling(top_p=0.9, max_tokens=1 << 30),
        "peaked top-p": Sampling(temperature=0.05, top_p=0.9, max_tokens=1 << 30),
        "top-k 200": Sampling(top_k=200, max_tokens=1 << 30),
        "flat top-p": Sampling(temperature=2.0, top_p=0.999, max_tokens=1 << 30),
        "penalties": Sampling(
            temperature=0.0, presence_penalty=0.5, repetition_penalty=1.2, max_tokens=1 << 30
        ),
        "all stop ids": Sampling(
            temperature=0.0, stop_token_ids=everything, min_tokens=1 << 30, max_tokens=1 << 30
        ),
        "logprobs 20": Sampling(temperature=0.0, logprobs=20, max_tokens=1 << 30),
    }


def milliseconds(samplings: Sequence[Sampling], vocab: int, repeats: int) -> float:
    """Return the median processor time of sampling one token for each."""
    logits_bv = 0.3 * torch.randn(len(samplings), vocab)
    samplers = [TokenSampler(sampling, vocab) for sampling in samplings]
    spent = []
    for index in range(repeats + 2):
        begin = time.process_time()
        sample_batch(samplers, logits_bv, [index] * len(samplers))
        spent.append(time.process_time() - begin)
    return 1e3 * statistics.median(spent[2:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"vocabulary {args.vocab}, {args.rows} rows, load {os.getloadavg()[0]:.1f}")
    print(f"{'kind':>14} {'batch ms':>9} {'one among greedy ms':>20}")
    for name, sampling in kinds(args.vocab).items():
        batch = milliseconds([sampling] * args.rows, args.vocab, args.repeats)
        mixed = milliseconds([sampling] + [GREEDY] * (args.rows - 1), args.vocab, args.repeats)
        print(f"{name:>14} {batch:9.2f} {mixed:20.2f}")


if __name__ == "__main__":
    main()
