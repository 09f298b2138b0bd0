"""Gangs that owe something and are not heard of."""

from __future__ import annotations

from csps.services.scheduling.gangs import Gangs
from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.limits import SECOND_NS, DeadlineSettings
from csps.services.scheduling.state import Gang
from csps.services.scheduling.steps import Steps


class Silence:
    """Has a gang reset that computes, draws or frees nothing although it should."""

    def __init__(self, gangs: Gangs, steps: Steps, deadlines: DeadlineSettings) -> None:
        self._gangs, self._steps, self._deadlines = gangs, steps, deadlines

    @property
    def watched(self) -> bool:
        """Somebody owes something."""
        return bool(self._steps.by_id) or any(it.owing for it in self._gangs.by_id.values())

    def check(self, now_ns: int) -> None:
        """Reset whoever was silent for too long."""
        limits = self._deadlines
        for gang in list(self._gangs.by_id.values()):
            computing_ns = now_ns - self._computing_heard_ns(gang, now_ns)
            decoding_ns = now_ns - self._decoding_heard_ns(gang, now_ns)
            if computing_ns > limits.prefill_silence_ns:
                self._gangs.reset(gang, _reason(gang, computing_ns))
            elif decoding_ns > limits.decode_silence_ns:
                self._gangs.reset(gang, _reason(gang, decoding_ns))

    def _computing_heard_ns(self, gang: Gang, now_ns: int) -> int:
        """Of the step that was not heard of for longest: others may go on beside one that hangs.

        A step in line makes no progress, and neither does an instance that waits in one for the
        step's other members. A word of an instance is therefore one for every step that has it
        still to come, and through their other instances for the steps behind those.
        """
        heard_ns: dict[InstanceId, int] = {it.id: it.heard_ns for it in gang.instances}
        oldest_ns = now_ns
        for step in self._steps.by_id.values():  # in the order of their launch
            if step.gang is gang and not step.held:
                latest_ns = max([step.launched_ns, *(heard_ns[it] for it in step.undone)])
                heard_ns.update(dict.fromkeys(step.undone, latest_ns))
                oldest_ns = min(oldest_ns, latest_ns)
        return oldest_ns

    @staticmethod
    def _decoding_heard_ns(gang: Gang, now_ns: int) -> int:
        oldest_ns = next(iter(gang.owing.values()), now_ns)
        return max(oldest_ns, max((it.heard_ns for it in gang.instances), default=0))


def _reason(gang: Gang, silent_ns: int) -> str:
    seconds = silent_ns // SECOND_NS
    return f"the {gang.role} gang owes an answer and was silent for {seconds} s"
