"""The layout planner's solver: choices with costs of single candidates and of pairs."""

import gc
import itertools
import math
import random
import weakref

import numpy as np
import pytest
from planning_problems import band, least_cost, least_cost_of_band, small_problem

from sdy_jax.errors import InternalError
from sdy_jax.lowering.planner.solve import contraction, cost_tables, solver
from sdy_jax.lowering.planner.solve.contraction import contract, graph_of
from sdy_jax.lowering.planner.solve.cost_tables import Choices, content
from sdy_jax.lowering.planner.solve.pbqp import PBQP, Ports, restricted
from sdy_jax.lowering.planner.solve.solver import solve
from sdy_jax.lowering.planner.solve.trws import pass_messages

EQUAL = 1e-9


@pytest.fixture(params=["dense", "factored"])
def factored(request, monkeypatch):
    """Whether small tables keep their ports, as large ones do."""
    if request.param == "factored":
        monkeypatch.setattr(cost_tables, "DENSE", 0)


@pytest.mark.usefixtures("factored")
def test_small_problems_are_solved_optimally():
    for seed in range(300):
        problem = small_problem(random.Random(seed), seed % 8)
        solution = solve(problem)
        assert solution.cost == problem.cost(solution.choice) == pytest.approx(least_cost(problem), rel=EQUAL), seed
        assert solution.is_optimal and solution.bound <= solution.cost, seed


@pytest.mark.usefixtures("factored")
def test_what_takes_many_sums_is_left_until_messages_have_dropped_candidates(monkeypatch):
    """As all nodes between two others here, so that messages are passed over whole paths."""
    monkeypatch.setattr("sdy_jax.lowering.planner.solve.solver.FEW_SUMS", 0)
    for small_table in (0, 100_000):
        monkeypatch.setattr("sdy_jax.lowering.planner.solve.solver.SMALL_TABLE", small_table)
        for seed in range(150):
            rng = random.Random(seed)
            problem = small_problem(rng, 3 + seed % 5)
            start = [rng.randrange(len(values)) for values in problem.costs] if seed % 2 else None
            solution = solve(problem, start)
            assert solution.cost == pytest.approx(least_cost(problem), rel=EQUAL), (small_table, seed)
            assert solution.is_optimal, (small_table, seed)


def test_contraction_leaves_what_takes_many_sums():
    problem = PBQP([np.zeros(3)] * 4, {(i, i + 1): np.arange(9.0).reshape(3, 3) % 4 for i in range(3)})
    problem.add(0, 3, np.eye(3))
    for most, left in ((26, 4), (27, 0)):
        graph, _ = graph_of(problem, 2.0**-30, math.inf, [Choices(np.arange(3))] * 4)
        contract(graph, range(4), most_sums=most)
        assert len(graph.remaining()) == left


@pytest.mark.usefixtures("factored")
def test_candidates_of_several_nodes_are_dropped_together():
    """With the costs that the restricted problem has, whatever was impossible before or is now."""
    for seed in range(150):
        rng = random.Random(seed)
        problem = small_problem(rng, 4)
        allowed = [sorted(rng.sample(range(len(v)), rng.randint(1, len(v)))) for v in problem.costs]
        smaller = restricted(problem, allowed).problem
        graph, _ = graph_of(problem, 2.0**-30, math.inf, [Choices(np.arange(len(v))) for v in problem.costs])
        dropped = {k: graph.pool.choices(np.array(a)) for k, a in enumerate(allowed) if len(a) < len(problem.costs[k])}
        graph.keep(dropped)
        for choice in itertools.product(*map(range, map(len, allowed))):
            paid = graph.constant + sum(graph.vectors[k].values[a] for k, a in enumerate(choice))
            for first, around in enumerate(graph.tables):
                paid += sum(t.column(choice[k])[choice[first]] for k, t in around.items() if first < k)
            wanted = smaller.cost(choice)
            assert (
                paid >= cost_tables.LIMIT if wanted == math.inf else paid * 2.0**-30 == pytest.approx(wanted, abs=1e-7)
            )


@pytest.mark.usefixtures("factored")
def test_messages_give_a_valid_bound():
    for seed in range(200):
        problem = small_problem(random.Random(seed), 3 + seed % 5)
        graph, raised = graph_of(problem, 2.0**-30, math.inf, [Choices(np.arange(len(v))) for v in problem.costs])
        decoded, least = pass_messages(graph, 40, math.inf), least_cost(problem) * 2.0**30
        assert decoded.bound - raised <= least * (1 + EQUAL) or least == math.inf, seed
        chosen = problem.cost([decoded.choice[node] for node in range(len(problem.costs))]) * 2.0**30
        assert chosen == pytest.approx(decoded.cost, abs=1.0, rel=EQUAL) or chosen == math.inf, seed


@pytest.mark.usefixtures("factored")
def test_messages_keep_the_candidates_of_all_choices_that_cost_no_more_than_what_is_known():
    dropped = 0
    for seed in range(60):
        problem = small_problem(random.Random(seed), 5)
        graph, raised = graph_of(problem, 2.0**-30, math.inf, [Choices(np.arange(len(v))) for v in problem.costs])
        known = 1.1 * least_cost(problem) * 2.0**30 if seed % 2 else math.inf
        decoded = pass_messages(graph, 10, known)
        for node, own in enumerate(problem.costs):
            for a in set(range(len(own))).difference(decoded.kept[node].tolist()):
                allowed = [[a] if k == node else range(len(v)) for k, v in enumerate(problem.costs)]
                least = least_cost(restricted(problem, allowed).problem) * 2.0**30
                assert least * (1 + EQUAL) + 1 + raised >= min(known, decoded.cost), (seed, node, a)
                dropped += 1
    assert dropped > 300


def test_candidates_too_dear_for_an_optimum_are_dropped(monkeypatch):
    """What is left where messages leave a small gap is solved exactly; without dropping it would be too large."""
    exact = 0
    for seed in range(8):
        problem, limit = band(random.Random(seed), 40, 3), 16
        problem.costs = [2 * own for own in problem.costs]
        with monkeypatch.context() as patched:
            patched.setattr("sdy_jax.lowering.planner.solve.trws._excess", lambda node: np.zeros(len(node.costs)))
            without = solve(problem, largest_table=limit)
        found = solve(problem, largest_table=limit)
        assert found.cost <= without.cost and found.bound >= without.bound
        exact += found.is_optimal and not without.is_optimal
        assert not found.is_optimal or found.cost == pytest.approx(solve(problem).cost, rel=EQUAL)
    assert exact > 0


def test_messages_come_close_on_large_graphs():
    gaps = []
    for seed in range(5):
        problem = band(random.Random(seed), 60, 3)
        solution, best = solve(problem, largest_table=0), solve(problem).cost
        assert solution.bound <= best * (1 + EQUAL) and solution.cost >= best * (1 - EQUAL)
        gaps.append((solution.cost - solution.bound) / solution.cost)
        kept = solve(problem, solve(problem).choice, largest_table=0, rounds=1)
        assert (kept.choice, kept.cost) == (solve(problem).choice, best)
    assert max(gaps) < 0.1 and sum(gaps) / 5 < 0.05


def test_too_many_tables_leave_the_graph_to_messages(monkeypatch):
    for seed in range(3):
        problem = band(random.Random(seed), 60, 4)
        monkeypatch.setattr(solver, "MOST_ENTRIES", 2000)
        solution = solve(problem)
        monkeypatch.undo()
        best = solve(problem).cost
        assert not solution.is_optimal
        assert solution.bound <= best * (1 + EQUAL) and solution.cost >= best * (1 - EQUAL)


def test_no_single_change_improves_what_messages_choose():
    for seed in range(5):
        problem = band(random.Random(seed), 60, 4)
        choice = solve(problem, largest_table=0, rounds=1).choice
        changed = ([*choice[:i], a, *choice[i + 1 :]] for i, own in enumerate(problem.costs) for a in range(len(own)))
        assert min(map(problem.cost, changed)) >= problem.cost(choice) * (1 - EQUAL)


def test_the_parts_in_which_the_start_is_better_are_kept():
    """Two graphs side by side; the start is optimal on the first and poor on the second."""
    mixed = 0
    for seed in range(5):
        first, second = band(random.Random(seed), 60, 4), band(random.Random(seed + 100), 60, 4)
        both = PBQP([*first.costs, *second.costs])
        for shift, part in ((0, first), (60, second)):
            for edge in part.edges:
                both.add(edge.first + shift, edge.second + shift, edge.ports)
        start = [*solve(first).choice, *[1] * 60]
        apart = [solve(part, largest_table=20, rounds=1).cost for part in (first, second)]
        cost = solve(both, start, largest_table=20, rounds=1).cost
        assert cost <= (solve(first).cost + apart[1]) * (1 + EQUAL)
        mixed += cost < min(both.cost(start), sum(apart)) * (1 - EQUAL)
    assert mixed > 0


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_bands_are_solved_as_by_dynamic_programming(width):
    for seed in range(4):
        problem = band(random.Random(seed), 80, width)
        solution = solve(problem)
        assert solution.cost == pytest.approx(least_cost_of_band(problem, width), rel=EQUAL)
        assert solution.is_optimal


@pytest.mark.dear
@pytest.mark.parametrize("start", [False, True])
def test_contraction_alone_keeps_an_optimum(start, monkeypatch):
    """Elimination of single nodes is switched off, so that all is left to dominance."""
    monkeypatch.setattr("sdy_jax.lowering.planner.solve.contraction.ELIMINATED", 0)
    reduced = 0
    for seed in range(300):
        rng = random.Random(seed)
        problem = small_problem(rng, 6)
        given = [rng.randrange(len(values)) for values in problem.costs] if start else None
        assert solve(problem, given).cost == pytest.approx(least_cost(problem), rel=EQUAL)
        graph, _ = graph_of(problem, 2.0**-30, math.inf, [Choices(np.arange(len(v))) for v in problem.costs])
        contract(graph, range(6))
        reduced += len(graph.remaining()) < 6
    assert reduced > 100


def test_ties_keep_the_start_and_then_the_first_candidate():
    alike = PBQP([np.zeros(3) for _ in range(4)], {(i, j): np.ones((3, 3)) for i in range(4) for j in range(i)})
    assert solve(alike, [2, 0, 1, 2]).choice == [2, 0, 1, 2]
    assert solve(alike).choice == [0, 0, 0, 0]
    cheaper = PBQP([*alike.costs, np.array([1.0, 0.0, 0.0])])
    assert solve(cheaper, [2, 0, 1, 2, 0]).choice == [2, 0, 1, 2, 1]


def test_problems_without_a_choice_without_edges_and_without_nodes():
    assert solve(PBQP([])).choice == []
    assert solve(PBQP([np.array([3.0])])) == solve(PBQP([np.array([3.0])]), [0])
    lonely = solve(PBQP([np.array([3.0, 2.0]), np.array([5.0]), np.array([4.0, math.inf])]))
    assert (lonely.choice, lonely.cost, lonely.bound) == ([1, 0, 0], 11.0, 11.0)
    assert solve(PBQP([np.zeros(1)] * 3, {(0, 2): np.array([[7.0]])})).cost == 7.0


def test_what_is_impossible_is_not_chosen():
    no = math.inf
    problem = PBQP(
        [np.zeros(2)] * 3, {(0, 1): np.array([[no, 1.0], [no, no]]), (1, 2): np.array([[0.0, 0.0], [no, 5.0]])}
    )
    assert solve(problem).choice == [0, 1, 1]
    impossible = PBQP([np.zeros(2)] * 2, {(0, 1): np.full((2, 2), no)})
    for solution in (solve(impossible), solve(impossible, [1, 1]), solve(impossible, largest_table=0)):
        assert solution.cost == solution.bound == no
    assert solve(impossible, [1, 1]).choice == [1, 1]


def test_edges_between_the_same_nodes_are_added():
    first, second = np.array([[0.0, 3.0], [3.0, 1.0]]), np.array([[2.0, 0.0], [3.0, 0.0]])
    problem = PBQP([np.zeros(2)] * 2, {(0, 1): first})
    problem.add(1, 0, second.T)
    problem.add(1, 0, Ports(np.array([0, 0]), np.array([0, 1]), np.array([[0.0, 1.0]]), 10.0))
    problem.add(0, 0, np.array([[1.0, 99.0], [99.0, 0.0]]))
    both = first + second + [[0.0], [10.0]] + [[1.0], [0.0]]
    assert [[problem.cost([a, b]) for b in range(2)] for a in range(2)] == both.tolist()
    assert solve(problem).cost == both.min()


def test_many_candidates_with_few_ports():
    rng = np.random.default_rng(0)
    ports = [rng.integers(0, 12, 300) for _ in range(5)]
    prices = rng.integers(0, 50, (12, 12)).astype(float)
    costs = [rng.integers(0, 50, 300).astype(float) for _ in range(5)]
    problem = PBQP(costs)
    small = PBQP([np.array([costs[i][ports[i] == port].min() for port in range(12)]) for i in range(5)])
    for i in range(5):
        for j in range(i):
            problem.add(j, i, Ports(ports[j], ports[i], prices))
            small.add(j, i, prices)
    assert solve(problem).cost == solve(small).cost == pytest.approx(solve(small).bound)
    messages = solve(problem, largest_table=0)
    assert messages.bound <= solve(small).cost <= messages.cost


def test_a_restriction_keeps_what_is_allowed():
    rng = random.Random(1)
    for seed in range(50):
        problem = small_problem(random.Random(seed), 6)
        allowed = [sorted(rng.sample(range(len(v)), rng.randint(1, len(v)))) for v in problem.costs]
        smaller = restricted(problem, allowed)
        choice = [rng.randrange(len(kept)) for kept in allowed]
        full = smaller.chosen_from(choice)
        assert full == [kept[a] for kept, a in zip(allowed, choice, strict=True)]
        assert smaller.choice_of(full) == choice
        assert smaller.problem.cost(choice) == problem.cost(full)


def test_equal_layers_are_reduced_once(monkeypatch):
    """The number of reductions and of tables that are computed does not grow with the layers."""
    computed = {"reductions": 0, "tables": 0}

    def counted(name, function):
        def count(*args):
            computed[name] += 1
            return function(*args)

        return count

    monkeypatch.setattr(
        "sdy_jax.lowering.planner.solve.contraction.undominated", counted("reductions", contraction.undominated)
    )
    monkeypatch.setattr(solver._Elimination, "_least", counted("tables", solver._Elimination._least))
    counts = []
    for layers in (10, 40):
        computed.update(reductions=0, tables=0)
        solution = solve(band(random.Random(0), 12, 3, layers))
        counts.append(dict(computed))
        assert solution.is_optimal
    assert counts[1]["reductions"] <= 1.2 * counts[0]["reductions"]
    assert counts[1]["tables"] <= 1.2 * counts[0]["tables"]


def test_costs_of_summation_order_decide_nothing():
    """0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in the last bit, and still the start stays."""
    up, down = np.array([0.0, 0.1]), np.array([0.1, 0.0])
    problem = PBQP([np.array([0.1 + 0.2, 0.0]), np.array([0.0, 0.3])], {(0, 1): np.add.outer(down, up)})
    problem.add(0, 1, np.array([[9.0, 0.0], [0.3, 9.0]]))
    assert problem.cost([0, 1]) != problem.cost([1, 0])
    assert solve(PBQP([np.array([0.3, 0.1 + 0.2])]), [1]).choice == [1]


def test_malformed_problems_are_refused():
    with pytest.raises(InternalError, match="node 1 needs a list of costs"):
        PBQP([np.zeros(2), np.zeros((2, 2))])
    with pytest.raises(InternalError, match=r"edge 0-1 needs prices for \(2, 3\) candidates"):
        PBQP([np.zeros(2), np.zeros(3)], {(0, 1): np.zeros((3, 2))})


@pytest.mark.parametrize("copied", [True, False])
def test_arrays_are_keys_by_their_contents(copied, monkeypatch):
    if not copied:
        monkeypatch.setattr(cost_tables, "SMALL", 0)
    a, ports = np.arange(6.0).reshape(2, 3), np.array([1, 0])
    same = {content(a, None): "plain", content(a, ports): "with ports"}
    assert (
        same[content(a.copy(), None)] == "plain" and same[content(np.asfortranarray(a), ports.copy())] == "with ports"
    )
    for other in (content(a), content(a.reshape(3, 2), None), content(a + 1, None), content(a, ports[::-1])):
        assert other not in same
    rows = np.arange(12.0).reshape(4, 3)
    assert content(rows) != content(rows[[0, 2, 1, 3]])  # with the same sum, first and last row


def test_tables_go_with_the_problem_without_a_search_for_garbage():
    """Planning puts that off, and makes many problems with large tables."""
    problem = band(random.Random(1), 12, 4)
    gc.collect()
    gc.disable()
    try:
        graph, _ = graph_of(problem, 2.0**-30, math.inf, [Choices(np.arange(len(v))) for v in problem.costs])
        cores = [weakref.ref(table.core) for tables_ in graph.tables for table in tables_.values()]
        assert cores and pass_messages(graph, 5, math.inf).choice
        del graph
        assert not any(core() is not None for core in cores)
    finally:
        gc.enable()
