"""Bounds on two servers, from measuring to asking, and `csps` beside Sarathi's chunked prefill.

    sudo python benchmarks/bounds_two_servers.py --out FOLDER [--model DIRECTORY] [--rate 800mbit]
        [--accuracy 4096 8192 --accuracy-limit 7200] [--lengths 8192 16384 32768] [--rounds 4]
        [--loads needlebench bookcorpus --rates 0.1 0.2] [--quick]

For one checkpoint, as an operator does it (`docs/profiling.md`): measure links between the ranks of
a running server on the two-server testbed, phases on this machine and, with `--accuracy`, losses at
these lengths; train; plan; then serve, and ask with bounds (`configurator.py live`). The included
model needs no `--accuracy`: its losses ship.

With `--loads`, `csps bench` then sends the same requests to `csps` without bounds, with a bound of
0 and of 0.01, and to `chunked_prefill` on an elastic gang of as many ranks. The results have the
share of right answers beside the times. Lengths are the papers', scaled to `--longest`.

FOLDER gets `sib.sqlite`, `live.json`, `plan.txt`, a result of each load, and `steps.json`: every
command with its seconds. Commands whose result is there are not repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import report
import yaml

from csps.configurator.regressors.accuracy import DIGEST_DIGITS, KIND, SHIPPED
from csps.models.checkpoints.checkpoint import weights_digest
from csps.models.network.spec import read_spec
from csps.services.measured.attention_options import accuracy_folder, regressors_folder
from csps.services.settings.settings import Settings

HERE = Path(__file__).parent
URL = "http://127.0.0.1:8000"
TESTBED = [sys.executable, str(HERE / "testbed")]
CSPS = [sys.executable, "-m", "csps.cli"]
BOUNDED = {
    "exact": None,
    "loss-0": {"max_accuracy_loss": 0},
    "loss-0.01": {"max_accuracy_loss": 0.01},
}
"""Objectives of the requests that `csps` gets."""


def main() -> int:
    """Run all steps; return the exit status."""
    arguments = _arguments()
    run = _Run(arguments)
    run.measure()
    run.ask()
    for policy in ("csps", "chunked_prefill") if arguments.loads else ():
        run.load(policy)
    result = {"benchmark": "bounds on two servers", "model": arguments.model}
    report.publish(result, run.steps, arguments.out / "steps.json")
    return 0


class _Run:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._out: Path = arguments.out.resolve()
        self._out.mkdir(parents=True, exist_ok=True)
        self._sib = self._out / "sib.sqlite"
        self._config = self._out / "config.yaml"
        self.steps: list[dict[str, Any]] = []

    def measure(self) -> None:
        """Measure links, phases and losses, then train and plan."""
        arguments, quick = self._arguments, ["--quick"] if self._arguments.quick else []
        known = ["--config", str(self._config), "--sib", str(self._sib)]
        if not self._config.exists():
            with self._served("csps") as config:
                links = [*CSPS, "profile", "links", "--config", str(config)]
                self._inside([*links, "--sib", str(self._sib), *quick])
                shutil.copyfile(config, self._config)
            self._step([*CSPS, "profile", "phases", *known, *quick])
            if arguments.accuracy:
                limit = ["--limit", str(arguments.accuracy_limit)]
                lengths = map(str, arguments.accuracy)
                self._step(
                    [*CSPS, "profile", "accuracy", *known, "--lengths", *lengths, *limit, *quick]
                )
        self._step([*CSPS, "train", *known])
        cluster = self._out / "cluster.yaml"
        cluster.write_text(yaml.safe_dump(self._cluster(), sort_keys=False))
        folders = [accuracy_folder(regressors_folder(self._sib)), self._shipped()]
        accuracy = next((["--accuracy", str(each)] for each in folders if each.exists()), [])
        longest = str(max(arguments.lengths))
        plan = [*CSPS, "plan", "--length", longest, "--cluster", str(cluster), *accuracy]
        printed = self._step([*plan, "--max-accuracy-loss", "0.01"], may_fail=True)
        (self._out / "plan.txt").write_text(printed)

    def _shipped(self) -> Path:
        """Return where losses of the model would ship."""
        model = Settings.model_validate({"model": self._arguments.model}).model_dir
        return SHIPPED / weights_digest(model)[:DIGEST_DIGITS] / KIND

    def ask(self) -> None:
        """Ask a server with bounds."""
        arguments, out = self._arguments, self._out / "live.json"
        if out.exists():
            return
        with self._served("csps"):
            live = [sys.executable, str(HERE / "configurator.py"), "live", "--base-url", URL]
            lengths = ["--lengths", *map(str, arguments.lengths)]
            self._inside([*live, *lengths, "--rounds", str(arguments.rounds), "--json", str(out)])

    def load(self, policy: str) -> None:
        """Send the loads to a server with a policy."""
        wanted = [
            (name, rate, bounds, objective)
            for name in self._arguments.loads
            for rate in self._arguments.rates
            for bounds, objective in (BOUNDED if policy == "csps" else {"exact": None}).items()
        ]
        with self._served(policy):
            for name, rate, bounds, objective in wanted:
                self._send(f"{policy}-{bounds}-{name}-{rate:g}", name, rate, objective)

    def _send(
        self, result: str, name: str, rate: float, objective: Mapping[str, float] | None
    ) -> None:
        if (self._out / f"{result}.json").exists():
            return
        arguments = self._arguments
        asked = [] if objective is None else ["--objective", json.dumps(objective)]
        sizes = ["--max-input-len", str(arguments.longest), "--output-len", "16"]
        saved = ["--save-result", "--result-dir", str(self._out)]
        count = ["--num-prompts", str(arguments.prompts), "--num-warmups", "4", "--seed", "1"]
        self._inside(
            [
                *(*CSPS, "bench", "serve", "--base-url", URL, "--dataset-name", name),
                *(*sizes, *count, "--request-rate", str(rate), *asked),
                *(*saved, "--result-filename", f"{result}.json"),
            ]
        )

    # --- servers -------------------------------------------------------------------------------

    @contextmanager
    def _served(self, policy: str) -> Iterator[Path]:
        """Yield the configuration of a server on the testbed, for the duration of a block."""
        settings = self._out / f"{policy}.yaml"
        settings.write_text(yaml.safe_dump(self._settings(policy)))
        bed = self._step([*TESTBED, "up", "--rate", self._arguments.rate]).split()[-1]
        try:
            up = ["--model", self._arguments.model, "--settings", str(settings)]
            self._step([*TESTBED, "ray-up", *up, "--bed", bed])
            yield Path("/run/csps-testbed") / f"{bed}.files" / "config.yaml"
        finally:
            self._step([*TESTBED, "down"], may_fail=True)

    def _settings(self, policy: str) -> dict[str, Any]:
        base: dict[str, Any] = {"scaling_information_base": str(self._sib)}
        if policy == "csps":
            return base
        # As many ranks that compute prompts, two on each server; they decode as well.
        scheduling = {"policy": policy, "token_budget": 256}
        return {**base, "elastic": {"instances": 4, "num_cpus": 0.9}, "scheduling": scheduling}

    def _cluster(self) -> dict[str, Any]:
        """Return the testbed as `csps plan` takes it."""
        settings = Settings.model_validate({"model": self._arguments.model})
        spec = read_spec(settings.model_dir, settings.model_overrides)
        server = {"count": 2, "instances": 2, "permissions": ["prefill"], "kv_slots": 40_960}
        return {
            "servers": [server],
            "model": {
                "hidden": spec.hidden,
                "heads": spec.heads,
                "kv_heads": spec.kv_heads,
                "head_dim": spec.head_dim,
                "layers": spec.layers,
                "intermediate": spec.intermediate,
                "element_bytes": 4,
            },
            "rank": {"sib": str(self._sib), "ranks_per_core": 2},
        }

    def _inside(self, command: Sequence[str]) -> str:
        """Run a command on server 0."""
        return self._step([*TESTBED, "exec", "0", *command])

    def _step(self, command: Sequence[str], *, may_fail: bool = False) -> str:
        """Run a command; return what it has printed."""
        print("$", *command, flush=True)
        begin = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=not may_fail)
        print(done.stdout, flush=True)
        self.steps.append(
            {
                "command": " ".join(map(str, command)),
                "s": time.monotonic() - begin,
                "status": done.returncode,
            }
        )
        return done.stdout


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--model", default="needle", help="checkpoint directory or shipped model")
    parser.add_argument("--rate", default="800mbit", help="of the link between the servers")
    parser.add_argument("--accuracy", type=int, nargs="*", help="lengths to measure losses at")
    parser.add_argument("--accuracy-limit", type=float, default=7_200.0, help="s")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8_192, 16_384, 32_768])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--loads", nargs="*", default=[], help="such as needlebench bookcorpus")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.2], help="requests a s")
    parser.add_argument("--longest", type=int, default=32_768, help="tokens of a load's longest")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="fewer points of each measurement")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
