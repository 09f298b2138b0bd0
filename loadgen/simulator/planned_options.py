"""Options of attention in simulations: what a configurator would offer, by the pipeline simulator.

A live router asks its configurator for the options of a bucket when a request misses them. Here the
answer is there at once. Without measured losses of accuracy, only what drops nothing is known to
lose nothing, as in `csps plan`; drop ratios that a request fixes are used anyway.

Times are relative to exact attention that exchanges nothing, which is what a latency table holds. A
router's cost table has them relative to exact attention as it runs; then a slower link would make
the other options seem faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from csps.configurator.costs.cost_table import (
    EXACT_STRATEGY,
    WHOLE_PERMILLE,
    Allowed,
    Bucket,
)
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import (
    WHOLE,
    can_simulate,
    prefill_seconds,
    ring_seconds,
)
from csps.configurator.pipeline.program import LinkSpeed, Wiring
from csps.configurator.plan.predicted_options import MOST_INSTANCES, bucket_ends, exact_candidates
from csps.configurator.regressors.accuracy import AccuracyModel
from csps.configurator.search.search import SearchProblem, admissible
from csps.configurator.search.space import LOSSES, ImportanceScoring, LayerGroups, Loss, Space
from csps.loadgen.simulator.hardware import RankSpeed
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import (
    AUTO,
    BOUNDED,
    ENGINE_NAMES,
    LEVELS,
    RINGS,
    SPARSE,
    Objective,
    RequestClass,
    option_name,
    parse_option,
)
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import GroupShape, Topology

MILLION = 1_000_000
FREE = LinkSpeed(bytes_per_s=1e18)
"""Link on which nothing takes time."""


class PlannedOptions(Mapping[Bucket, tuple[Allowed, ...]]):
    """Options by bucket of the cost table, planned when they are looked up first.

    Args:
        speed: speed of a rank and of its links.
        accuracy: losses of the model's accuracy. None: they were not measured.
    """

    def __init__(self, speed: RankSpeed, accuracy: AccuracyModel | None = None) -> None:
        self._speed, self._accuracy = speed, accuracy
        self._classes = {AUTO: RequestClass(), BOUNDED: RequestClass(objective=Objective())}
        self._found: dict[Bucket, tuple[Allowed, ...]] = {}
        self._permilles: dict[tuple[str, GroupShape, int, int], int] = {}
        self._groups: dict[GroupShape, SimulatedGroup] = {}
        layers = speed.model.layers
        self._space = Space(
            groups=LayerGroups.alike(layers) if accuracy is None else accuracy.groups_of(layers),
            step=0.1,
            rungs=(0.1, 0.3, 0.5, 0.7, 0.9, 0.98),
            # A bucket of eight instances takes seconds with all that `csps plan` compares.
            micro_partitions=((4,), (1,), (1,)),
            scoring=(ImportanceScoring("same", 64),),
            strategies=("ntp",),
        )

    def measured(self, accuracy: AccuracyModel) -> None:
        """Offer what loses as much accuracy as a request allows, from now on."""
        self._accuracy = accuracy
        self._space = replace(self._space, groups=accuracy.groups_of(self._space.groups.layers))
        self._found.clear()

    def add(self, cls: RequestClass) -> None:
        """Plan options for requests of a class as well.

        Raises:
            ConfigError: the class fixes attention that cannot be simulated.
        """
        if cls.csa is not None:
            if not can_simulate(cls.csa):
                raise ConfigError(
                    "csps: nested levels and scores of all queries cannot be simulated"
                )
            if cls.objective is not None:
                raise ConfigError(
                    "csps: simulations take bounds, or attention that is fixed, not both"
                )
        self._classes[cls.row] = cls

    def __getitem__(self, bucket: Bucket) -> tuple[Allowed, ...]:
        if bucket not in self._found:
            self._found[bucket] = self._plan(bucket, self._classes[bucket.row])
        return self._found[bucket]

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def permille(self, option: str, shape: GroupShape, history: int, length: int) -> int:
        """Return a step's time by an option, in thousandths of computing SP-NTP on such a group."""
        exponent, bits = length.bit_length() - 1, history.bit_length()
        return self._permille(option, shape, exponent, bits)

    def prices(self, shape: GroupShape, tokens: int) -> bool:
        """Return whether the group is small enough to simulate, and each instance has tokens."""
        return 1 < shape.sp <= min(MOST_INSTANCES, tokens)

    def _permille(self, option: str, shape: GroupShape, exponent: int, bits: int) -> int:
        key = option, shape, exponent, bits
        if key not in self._permilles:
            tokens, history = _middle(exponent, bits)
            group, (strategy, settings) = self._group(shape), parse_option(option)
            if not self.prices(shape, tokens):
                return WHOLE_PERMILLE
            servers = [place.server_id for place in Topology.of(group.locations).locations]
            wiring = Wiring.of_servers(servers, inside=FREE, between=FREE)
            alone = replace(group, wiring=wiring)
            computing_s = float(prefill_seconds(alone, [WHOLE], tokens, history)[0])
            ring = next((ring for ring in RINGS if ring == strategy), None)
            if ring is not None:
                seconds = ring_seconds(group, ring, tokens, history)
            else:
                planned = settings or _settings_of(strategy)
                seconds = float(prefill_seconds(group, [planned], tokens, history)[0])
            self._permilles[key] = max(1, round(1000 * seconds / computing_s))
        return self._permilles[key]

    def _plan(self, bucket: Bucket, cls: RequestClass) -> tuple[Allowed, ...]:
        tokens, history = _middle(bucket.exponent, bucket.history_bits)
        if not self.prices(bucket.shape, tokens):
            return (Allowed(EXACT_STRATEGY),)
        group = self._group(bucket.shape)
        if cls.csa is not None:
            return tuple(self._allowed(bucket, [_with_strategy(cls.csa)]))
        candidates = exact_candidates(self._space, group, history)
        lossless = [
            Allowed(EXACT_STRATEGY, self._of(bucket, EXACT_STRATEGY)),
            *self._allowed(bucket, (each for each in candidates if each != WHOLE)),
            *(Allowed(ring, self._of(bucket, ring)) for ring in RINGS),
        ]
        fastest = min(lossless, key=lambda option: option.permille)
        if cls.objective is None:
            return (fastest,)
        return (fastest, *self._lossy(bucket, group, tokens, fastest.permille))

    def _lossy(
        self, bucket: Bucket, group: SimulatedGroup, tokens: int, exact: int
    ) -> Iterator[Allowed]:
        """Yield options that lose accuracy, unless another loses as little and takes less time."""
        if self._accuracy is None:
            return
        ends = [
            self._accuracy.of_group(group.locations, layers=group.shape.layers, tokens=end)
            for end in bucket_ends(tokens)
        ]
        problem = SearchProblem(
            group=group,
            tokens=tokens,
            objective=Objective(max_accuracy_loss=LOSSES[-1]),
        )
        settings = [
            each
            for each in admissible(problem, self._space, lambda asked: _largest(ends, asked))
            if not each.lossless
        ]
        losses = _largest(ends, settings)
        options = [
            option._replace(loss_ppm=round(loss * MILLION))
            for option, loss in zip(self._allowed(bucket, settings), losses, strict=True)
        ]
        for option in sorted(options, key=lambda each: (each.loss_ppm, each.permille)):
            if option.permille < exact:
                exact = option.permille
                yield option

    def _allowed(self, bucket: Bucket, settings: Iterable[CsaSettings]) -> Iterator[Allowed]:
        for each in settings:
            name = option_name(_engine_name(each), each)
            yield Allowed(name, self._of(bucket, name))

    def _of(self, bucket: Bucket, option: str) -> int:
        return self._permille(option, bucket.shape, bucket.exponent, bucket.history_bits)

    def _group(self, shape: GroupShape) -> SimulatedGroup:
        if shape not in self._groups:
            self._groups[shape] = self._speed.group(shape.places)
        return self._groups[shape]


def _largest(ends: Sequence[Loss], settings: Sequence[CsaSettings]) -> list[float]:
    """Return the larger losses of a bucket's shortest and longest prompts."""
    return list(map(max, *(loss(settings) for loss in ends)))


def _middle(exponent: int, history_bits: int) -> tuple[int, int]:
    """Return the prompt and the history in the middle of a bucket, as a router asks for it."""
    history = max(1, 3 << history_bits >> 2) if history_bits else 0
    return max(1, 3 << exponent >> 1), history


def _with_strategy(settings: CsaSettings) -> CsaSettings:
    return settings if settings.strategy is not None else replace(settings, strategy="ntp")


def _settings_of(strategy: str) -> CsaSettings:
    """Return the settings of a strategy that is named without any."""
    if strategy.startswith("sp_tp"):
        return CsaSettings(levels=1, strategy="tp")
    return CsaSettings(strategy="ntp") if strategy in (LEVELS, SPARSE) else WHOLE


def _engine_name(settings: CsaSettings) -> str:
    if settings.strategy in ("tp", "tp_flat"):
        return ENGINE_NAMES[settings.strategy]
    return LEVELS if settings.lossless else SPARSE
