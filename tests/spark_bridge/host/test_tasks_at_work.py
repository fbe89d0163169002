"""A group waits for tasks that are about to open, judged by the number of concurrent tasks in the previous batch."""

from __future__ import annotations

from spark_bridge.host.commits import TasksAtWork


def test_no_wait_once_as_many_tasks_came_as_in_the_last_batch() -> None:
    tasks = TasksAtWork()
    for partition in (0, 1, 2):
        tasks.opened("op", partition)
    tasks = tasks.next_batch()
    tasks.opened("op", 0)
    assert tasks.expects_more()
    tasks.opened("op", 1)
    tasks.opened("op", 2)
    tasks.answered("op", 0)
    assert not tasks.expects_more(), "the last tasks are running, fewer than ran at once, and no more will come"
