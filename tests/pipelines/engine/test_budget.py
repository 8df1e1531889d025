from __future__ import annotations

import threading

from raydist.options import AutotuneOptions
from raydist.pipelines.engine.budget import Budget, Budgets
from raydist.pipelines.engine.machine import free_memory, num_cores


def test_no_more_is_granted_than_there_is() -> None:
    budget = Budget(5)
    assert [budget.take(3), budget.take(3), budget.take(3)] == [3, 2, 0]
    budget.give(2)
    assert (budget.free, budget.take(9)) == (2, 2)


def test_what_is_there_already_is_counted_even_beyond_the_limit() -> None:
    budget = Budget(5)
    budget.charge(7)
    assert (budget.free, budget.take(1)) == (-2, 0)
    budget.charge(-7)
    assert budget.take(1) == 1


def test_several_threads_never_get_more_together() -> None:
    budget, taken = Budget(1000), []
    start = threading.Barrier(4)

    def take() -> None:
        start.wait(10)
        taken.append(sum(budget.take(1) for _ in range(500)))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == 1000


def test_defaults_are_the_cores_and_half_of_the_free_memory() -> None:
    budgets = Budgets(AutotuneOptions())
    assert budgets.threads.limit == float("inf")
    assert budgets.tuned_threads == num_cores()
    free = free_memory() or float("inf")
    assert 0.3 * free < budgets.ram.limit < 0.7 * free or budgets.ram.limit == float("inf")


def test_what_the_options_say_holds() -> None:
    budgets = Budgets(AutotuneOptions(cpu_budget=3, ram_budget=100))
    assert (budgets.threads.limit, budgets.tuned_threads, budgets.ram.limit) == (3, 3, 100)
