"""Somebody who has keys forgotten that nobody has: all files are exchanged for new ones, and all stays as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from backends.encoding.sorted_pairs import SortedPairs
from coordinator_actor.surgery.forgetting import ForgetRequest, forget_in_running
from coordinator_actor.surgery.forgotten_keys import ForgottenKeys
from tests.simulation.network import KNOWN_ERRORS, UnreachableError

if TYPE_CHECKING:
    from tests.simulation.world import World


class NobodysKeys:
    """``ForgottenKeys`` that no row belongs to, and that may be in any partition."""

    num_keys = 1

    def partitions(self, num_partitions: int) -> frozenset[int]:
        return frozenset(range(num_partitions))

    def without(self, family: str, pairs: SortedPairs) -> SortedPairs:
        return pairs


def keys_of(schema: Any, num_groups: int) -> ForgottenKeys:
    return cast(ForgottenKeys, NobodysKeys())


class Forgetful:
    """Exchanges the files of a stream again and again. Dies now and then with all that it has begun."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.exchanges = 0

    def run(self) -> None:
        """Go on until nothing goes wrong any more: while files are written anew, none are removed."""
        s = self._world.scheduler
        while self._world.healed_at is None:
            s.sleep(s.random.random() * 10 * self._world.slowness)
            process = s.process("forgetful")
            task = s.spawn(process, self._forget, "forget")
            if s.random.random() < 0.2:
                s.at(s.random.random() * 5, lambda process=process: s.kill(process))
            s.join(task)

    def _forget(self) -> None:
        world = self._world
        s, stream = world.scheduler, world.streams[0]
        request = ForgetRequest(
            s.random.choice(stream.model.operators),
            keys_of,
            say=lambda step: s.log("FORGET", step),
            clock=lambda: s.now,
            open_storage=world.disk.open,  # type: ignore[arg-type]
        )
        try:
            forget_in_running(world.sessions[-1].cluster.port(), stream.name, request)
        except (UnreachableError, *KNOWN_ERRORS) as error:
            s.log("nothing was forgotten:", type(error).__name__, str(error))
            return
        self.exchanges += 1
        stream.model.check_openable(world.disk.all_files(stream.state))
