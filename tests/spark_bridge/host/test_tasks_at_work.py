"""For whom a group waits: tasks that are about to open, by what was at work at once in the batch before."""

from __future__ import annotations

from spark_bridge.host.commits import TasksAtWork


def test_nobody_is_waited_for_when_as_many_have_come_as_in_the_batch_before() -> None:
    tasks = TasksAtWork()
    for partition in (0, 1, 2):
        tasks.opened("op", partition)
    tasks = tasks.next_batch()
    tasks.opened("op", 0)
    assert tasks.expects_more()
    tasks.opened("op", 1)
    tasks.opened("op", 2)
    tasks.answered("op", 0)
    assert not tasks.expects_more(), "the last ones are at work, fewer than were at once, and nobody else comes"
