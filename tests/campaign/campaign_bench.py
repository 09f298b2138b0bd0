"""What trials run on: deployed servers that they share, the right tokens, and the judge."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
from campaign_states import Scene, documented, played
from campaign_trial import Outcome, Trial
from deployed_server import DEADLINE_S, MODEL, Deployed, deployed, stop_head
from outage import Outage
from tiny_checkpoints import make_checkpoint, random_tokens, reference_answer

from csps.models.tokenizers.tokenizer import Tokenizer
from csps.protocols.core.errors import FaultError
from csps.services.scheduling.events.limits import BLOCK_TOKENS

POSITIONS = 65_536
PAIR_SLOTS, ELASTIC_SLOTS = 8_192, 16_200
_PAIR: dict[str, Any] = {
    "prefill": {"instances": 2, "kv_slots": PAIR_SLOTS},
    "decode": {"instances": 2, "kv_slots": PAIR_SLOTS},
}
SERVERS: dict[str, dict[str, Any]] = {
    "pair": _PAIR,
    "fixed groups": {**_PAIR, "scheduling": {"policy": "fixed_sp", "sp": 2}},
    "rings": {**_PAIR, "scheduling": {"policy": "context_parallel"}},
    "chunks": {**_PAIR, "scheduling": {"policy": "tetris"}},
    "piggybacking": {
        "elastic": {"instances": 2, "kv_slots": PAIR_SLOTS},
        "scheduling": {"policy": "chunked_prefill"},
    },
    "elastic": {
        "elastic": {"instances": 4, "kv_slots": ELASTIC_SLOTS},
        "scheduling": {"policy": "loongserve"},
    },
}
"""Settings of the servers, beside those of `deployed_server`. Pools are small, so that one prompt
fills them (`lost_slots`)."""
PROBE, PROBE_TOKENS = random_tokens(300, seed=3), 4
TIE = 1e-4
"""Difference of two log-probabilities below which either token is right."""
READY_S = 60.0
"""Time for a server to be ready before a trial; one that is not is started anew."""


class Oracle:
    """Greedy answers of transformers, remembered in a file because long ones take seconds."""

    def __init__(self, model_dir: Path, file: Path) -> None:
        self._model_dir, self._file, self._tokenizer = model_dir, file, Tokenizer(model_dir)
        self._known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def text(self, prompt: Sequence[int], count: int) -> str:
        """Return an answer as text."""
        return self._tokenizer.decode([best[0][0] for best in self._answer(prompt, count)])

    def wrong_at(self, prompt: Sequence[int], count: int, tokens: Sequence[str]) -> int | None:
        """Return the first position at which the tokens of an answer, or of its beginning, are
        wrong; None if they are right. Behind a tie, another answer is right."""
        for at, (token, best) in enumerate(zip(tokens, self._answer(prompt, count), strict=False)):
            words = [(self._word(token_id), logprob) for token_id, logprob in best]
            if token != words[0][0]:
                near = [word for word, logprob in words if words[0][1] - logprob <= TIE]
                return None if token in near else at
        return None if len(tokens) <= count else count

    def _word(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode(errors="backslashreplace")

    def _answer(self, prompt: Sequence[int], count: int) -> list[list[tuple[int, float]]]:
        """Return the likeliest tokens at each position, with their log-probabilities."""
        key = hashlib.sha256(f"{list(prompt)} {count}".encode()).hexdigest()[:16]
        if key not in self._known:
            logits_tv = reference_answer(self._model_dir, tuple(prompt), count)
            best = logits_tv.log_softmax(-1).topk(3)
            self._known[key] = [
                list(zip(ids, values, strict=True))
                for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
            self._file.write_text(json.dumps(self._known))
        answer: list[list[tuple[int, float]]] = self._known[key]
        return answer


class Bench:
    """One deployed server at a time, and what trials judge it by."""

    def __init__(self, folder: Path) -> None:
        """Use a folder for the model, the servers' files and the oracle's memory. A server that an
        earlier process left there is ended."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        stop_head(folder / "server")
        model_dir = folder / "model"
        if not (model_dir / "config.json").exists():
            make_checkpoint(model_dir, "llama", max_position_embeddings=POSITIONS)
        self.model_dir = model_dir
        self.oracle = Oracle(model_dir, folder / "oracle.json")
        self._name = ""
        self._server: Deployed | None = None
        self._open = ExitStack()

    def server(self, name: str | None) -> Deployed:
        """Return the server with the settings of `SERVERS[name]`, ready and idle: the one that
        runs, or a new one."""
        assert name is not None, "the trial names no server"
        if name != self._name or self._server is None or not _is_ready(self._server):
            self.close()
            run_dir = self.folder / "server"
            run_dir.mkdir(exist_ok=True)
            started = deployed(self.model_dir, run_dir, **SERVERS[name])
            self._server, self._name = self._open.enter_context(started), name
        return self._server

    @property
    def running(self) -> Deployed | None:
        """The server that runs, if one does."""
        return self._server

    def close(self) -> None:
        """End the server."""
        self._server, self._name = None, ""
        with suppress(OSError):
            self._open.close()
        stop_head(self.folder / "server")
        self._open = ExitStack()

    def disturbed(
        self,
        trial: Trial,
        aimed: Callable[[Deployed], AbstractContextManager[object]],
        *,
        may_fail: bool = False,
        lasts_s: float | None = None,
    ) -> Outcome:
        """Bring the server into the trial's state, apply a fault, and judge what clients see.

        Short requests are sent four times a second, and `/health` is asked beside them.

        Args:
            aimed: finds what the fault hits, before there is a state to miss, and returns a context
                that applies the fault and undoes it.
            may_fail: requests may end with a documented error.
            lasts_s: time after which the fault is undone, and from which on recovery counts. None:
                the server has to mend it.
        """
        server, outcome = self.server(trial.server), Outcome(tries=0)
        for prompt, count in played(trial.state, trial.seed):
            self.oracle.wrong_at(prompt, count, ())  # computed before, not beside the server
        fault, began = aimed(server), time.monotonic()
        with Outage(server, PROBE, PROBE_TOKENS) as outage:
            with Scene(server, trial.state, trial.seed) as scene:
                outcome.measured["state_s"] = round(time.monotonic() - began, 2)
                outage.begin()
                with fault:
                    scene.hit()
                    if lasts_s is None:
                        outcome.recovery_s = outage.recovered()
                    else:
                        time.sleep(lasts_s)
                if lasts_s is not None:
                    outage.begin()
                    outcome.recovery_s = outage.recovered()
                scene.finish()
            self._judge_talks(scene, outcome)
        outcome.tries += len(scene.talks)
        self.judge_probes(outage, outcome)
        if not may_fail and (failed := outcome.documented + len(outcome.undocumented)):
            outcome.missed.append(f"{failed} requests failed, and none may")
        outcome.measured["red_s"] = round(outage.red_s(), 2)
        outcome.measured["longest_s"] = round(outage.longest_s(), 2)
        return outcome

    def judge_probes(self, outage: Outage, outcome: Outcome) -> None:
        """Count the short requests of an outage, once it is over."""
        expected = self.oracle.text(PROBE, PROBE_TOKENS)
        outcome.tries += len(outage.probes)
        outcome.green_lies += len(outage.lies())
        for probe in outage.probes:
            if probe.failure:
                kind = documented(probe.failure)
                outcome.documented += kind
                outcome.undocumented += [] if kind else [probe.failure]
            else:
                outcome.wrong += probe.text != expected

    def _judge_talks(self, scene: Scene, outcome: Outcome) -> None:
        for talk in scene.talks:
            prompt, count = talk.fields["prompt"], talk.fields["max_tokens"]
            known = scene.known[id(talk)]
            tokens = talk.received["tokens"][:known]
            at = self.oracle.wrong_at(prompt, known, tokens)
            if at is not None:
                outcome.wrong += 1
                outcome.missed.append(f"token {at} of a prompt of {len(prompt)} is {tokens[at]!r}")
            if talk in scene.left:
                continue
            if talk.tokens < count:
                reason = repr(talk.over)
                kind = isinstance(talk.over, BaseException) and documented(reason)
                outcome.documented += bool(kind)
                outcome.undocumented += [] if kind else [f"{talk.tokens} of {count}: {reason}"]

    def lost_slots(self, server: Deployed) -> int:
        """Return the KV slots that neither a request nor the prefix cache has: a prompt that needs
        the whole pool makes the cache give way, and is all that is left."""
        server.assert_only_cache_left()
        total = min(server.slots())
        self._fill(server, random_tokens(total - PROBE_TOKENS, seed=9))
        server.assert_only_cache_left()
        expected = (total - PROBE_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
        return max(abs(taken - expected) for taken in server.slots_taken())

    def _fill(self, server: Deployed, prompt: list[int]) -> None:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": PROBE_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S)
        assert answer.is_success, f"the whole pool is not free: {answer.text}"


def _is_ready(server: Deployed) -> bool:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError, FaultError):
            if httpx.get(f"{server.url}/health", timeout=5.0).is_success:
                return True
        if not server.head.alive:
            return False
        time.sleep(0.1)
    return False


def load_average() -> float:
    """Return the machine's load of the last minute."""
    return round(os.getloadavg()[0], 2)
