"""What the parts of the scheduler share while a batch of events is handled."""

from __future__ import annotations

from dataclasses import dataclass, field

from csps.protocols.errors import to_wire
from csps.services.scheduling.commands import (
    AnyCommand,
    Cancel,
    Keep,
    Release,
    ResetGang,
    SetGroup,
)
from csps.services.scheduling.events import WireError
from csps.services.scheduling.ids import GangId


@dataclass(slots=True)
class Turn:
    """The time, the commands so far, and whether the policy has to be asked."""

    now_ns: int = 0
    commands: list[AnyCommand] = field(default_factory=list)
    stale: bool = False
    """Something that decisions depend on has changed since the policy was asked."""
    wake_ns: int | None = None
    """When the policy wants to be asked although nothing changes."""

    def emit(self, command: AnyCommand) -> None:
        """Have the executor carry this out."""
        self.commands.append(command)

    def forget(self, gang: GangId) -> None:
        """The gang went down later in the turn: no command is for it."""
        kept: list[AnyCommand] = []
        for it in self.commands:
            if isinstance(it, Cancel) and gang in it.gangs:
                left = tuple(other for other in it.gangs if other != gang)
                kept += [Cancel(sequence=it.sequence, gangs=left)] if left else []
            elif not (isinstance(it, ResetGang | SetGroup | Keep | Release) and it.gang == gang):
                kept.append(it)
        self.commands = kept


def wire_error(error: Exception) -> WireError:
    """An exception in the form that crosses the seam."""
    wire = to_wire(error)
    return WireError(wire["code"], wire["message"], wire.get("data"))
