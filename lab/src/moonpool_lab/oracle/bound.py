"""An upper bound on the effective requests of any schedule, by linear programming.

Variables: the share of each request that is served, and of each shared node that is computed. A
request needs its shared nodes. In any interval of time, an instance has as many seconds as the
interval. So for each resource (`Resource`) and each interval,

    sum of the work that must lie within the interval <= instances * length

Requests that are all served or not at all, on instances that serve one thing at a time, in caches
that lose blocks and over links that take time, meet all these constraints. So the most requests
that these constraints allow are a bound. In each round, the constraints that the solution breaks
most are added, until the solution breaks none by much. The solution of each round is a bound.

The solver is not trusted. Any prices >= 0 of the constraints give a bound (`price_bound`): the cost
of all capacities, plus the value of each request above the cost of its work. The solver only
proposes prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from moonpool_lab.oracle.floors import Floats
from moonpool_lab.oracle.least_work import NO_NODE, LeastWork

ROUNDS = 40
CLOSE = 1e-3
"""A constraint that is broken by less than this share of its capacity is not added."""
MOST_ENDPOINTS = 300
"""The number of beginnings and ends of intervals that are checked for each resource."""
PER_LENGTH = 2
"""Constraints added in a round, for each power of two of the interval's length."""
SMALLEST_INTERVAL_S = 1e-6


class Work(NamedTuple):
    """Seconds of work, by request or by node, each to be done within its interval."""

    seconds: Floats
    from_s: Floats
    until_s: Floats


@dataclass(frozen=True, slots=True)
class Resource:
    """`instances` do this work of the requests and of the shared nodes."""

    name: str
    instances: float
    requests: tuple[Work, ...]
    nodes: tuple[Work, ...] = ()


@dataclass(frozen=True, slots=True)
class Bound:
    """`most` is the bound on effective requests. `shares`: the share of each request that the
    relaxed optimum serves."""

    most: int
    relaxed: float
    shares: Floats
    binding: dict[str, float]  # value of the capacity of each resource, in requests
    rounds: int


@dataclass(frozen=True, slots=True)
class _Interval:
    resource: int
    begin_s: float
    end_s: float


def upper_bound(demand: LeastWork, resources: Sequence[Resource], capacity: float = 1.0) -> Bound:
    """Returns the bound for a cluster with the share `capacity` of its capacity, by default the
    whole."""
    program = _Program(demand, [replace(r, instances=r.instances * capacity) for r in resources])
    intervals: list[_Interval] = []
    best = Bound(int(demand.possible.sum()), float(demand.possible.sum()), np.zeros(0), {}, 0)
    shares, nodes = demand.possible.astype(float), np.ones(len(demand.parent))
    for rounds in range(1, ROUNDS + 1):
        found = [i for n in range(len(resources)) for i in program.broken(n, shares, nodes)]
        new = [interval for interval in found if interval not in intervals]
        if not new:
            break
        intervals += new
        shares, nodes, prices = program.solve(intervals)
        relaxed = program.price_bound(intervals, prices)
        if relaxed < best.relaxed:
            values = program.values(intervals, prices)
            best = Bound(int(relaxed + 1e-6), relaxed, shares, values, rounds)
    if not len(best.shares):
        best = Bound(best.most, best.relaxed, shares, best.binding, 0)
    return best


class _Program:
    """The linear program of one workload. Columns: possible requests, then nodes."""

    def __init__(self, demand: LeastWork, resources: Sequence[Resource]) -> None:
        self._demand = demand
        self._resources = resources
        self._num, self._num_nodes = len(demand), len(demand.parent)
        self._needs = self._need_rows()
        self._rows: dict[_Interval, csr_array] = {}

    def _need_rows(self) -> csr_array:
        """Rows x - y <= 0: a request needs its leaf, and a node its parent."""
        demand, num = self._demand, self._num
        users = np.flatnonzero(demand.leaf != NO_NODE)
        children = np.flatnonzero(demand.parent != NO_NODE)
        needing = np.concatenate([users, num + children])
        needed = num + np.concatenate([demand.leaf[users], demand.parent[children]])
        count = len(needing)
        rows = np.concatenate([np.arange(count)] * 2)
        values = np.concatenate([np.ones(count), -np.ones(count)])
        shape = (count, num + self._num_nodes)
        return csr_array((values, (rows, np.concatenate([needing, needed]))), shape=shape)

    def row(self, interval: _Interval) -> csr_array:
        """The work that must lie within the interval, by column."""
        known = self._rows.get(interval)
        if known is not None:
            return known
        resource = self._resources[interval.resource]
        requests_s, nodes_s = np.zeros(self._num), np.zeros(self._num_nodes)
        for total_s, works in ((requests_s, resource.requests), (nodes_s, resource.nodes)):
            for work in works:
                inside = (work.from_s >= interval.begin_s) & (work.until_s <= interval.end_s)
                total_s += np.where(inside, work.seconds, 0.0)
        row = csr_array(np.concatenate([requests_s, nodes_s])[None, :])
        self._rows[interval] = row
        return row

    def capacity_s(self, interval: _Interval) -> float:
        return self._resources[interval.resource].instances * (interval.end_s - interval.begin_s)

    def solve(self, intervals: Sequence[_Interval]) -> tuple[Floats, Floats, Floats]:
        """Returns the shares of requests and nodes, and proposed prices of the intervals."""
        num, capacities_s = self._num, np.array([self.capacity_s(i) for i in intervals])
        scale = 1.0 / np.maximum(capacities_s, SMALLEST_INTERVAL_S)
        rows = vstack([self.row(i) * s for i, s in zip(intervals, scale, strict=True)])
        matrix = vstack([self._needs, rows]).tocsr()
        limits = np.concatenate([np.zeros(self._needs.shape[0]), capacities_s * scale])
        most = np.concatenate([self._demand.possible.astype(float), np.ones(self._num_nodes)])
        gain = np.concatenate([-np.ones(num), np.zeros(self._num_nodes)])
        bounds = np.stack([np.zeros(len(most)), most], axis=1)
        found = linprog(gain, A_ub=matrix, b_ub=limits, bounds=bounds, method="highs")
        if found.x is None:
            return np.zeros(num), np.zeros(self._num_nodes), np.zeros(len(intervals))
        prices = np.maximum(-found.ineqlin.marginals[self._needs.shape[0] :], 0.0) * scale
        solution = np.asarray(found.x, dtype=np.float64)
        return solution[:num], solution[num:], np.asarray(prices, dtype=np.float64)

    def price_bound(self, intervals: Sequence[_Interval], prices: Floats) -> float:
        """Returns the bound that these prices (requests per second of capacity) prove.

        Each request pays only for its work within the intervals. So for any prices, the optimum is
        at most the cost of all capacities, plus, for each tree of shared blocks, the most that its
        requests can be worth above the price of their own work and of their nodes.
        """
        demand = self._demand
        paid = np.zeros(self._num + self._num_nodes)
        total = 0.0
        for interval, price in zip(intervals, prices, strict=True):
            if price > 0.0:
                total += price * self.capacity_s(interval)
                paid += price * self.row(interval).toarray().ravel()
        worth = np.where(demand.possible, np.maximum(1.0 - paid[: self._num], 0.0), 0.0)
        alone = demand.leaf == NO_NODE
        total += float(worth[alone].sum())
        values = -paid[self._num :]
        np.add.at(values, demand.leaf[~alone], worth[~alone])
        for node in range(self._num_nodes - 1, -1, -1):  # children come after their parents
            value, parent = values.item(node), demand.parent.item(node)
            if value <= 0.0:
                continue
            if parent == NO_NODE:
                total += value
            else:
                values[parent] += value
        return total

    def values(self, intervals: Sequence[_Interval], prices: Floats) -> dict[str, float]:
        """Returns what the capacity of each resource is worth, in requests."""
        worth = {resource.name: 0.0 for resource in self._resources}
        for interval, price in zip(intervals, prices, strict=True):
            name = self._resources[interval.resource].name
            worth[name] += float(price) * self.capacity_s(interval)
        return worth

    def broken(self, number: int, shares: Floats, nodes: Floats) -> list[_Interval]:
        """Returns, for all lengths, the intervals of a resource whose capacity the solution exceeds
        most."""
        resource = self._resources[number]
        parts = [(work.seconds * shares, work.from_s, work.until_s) for work in resource.requests]
        parts += [(work.seconds * nodes, work.from_s, work.until_s) for work in resource.nodes]
        works, froms, untils = (np.concatenate(part) for part in zip(*parts, strict=True))
        needed = works > 0.0
        works, froms, untils = works[needed], froms[needed], untils[needed]
        if not len(works):
            return []
        begins, ends = _endpoints(froms), _endpoints(untils)
        table = np.zeros((len(begins), len(ends)))
        first = np.searchsorted(begins, froms, side="right") - 1
        last = np.searchsorted(ends, untils, side="left")
        np.add.at(table, (first, last), works)
        inside_s = np.cumsum(np.cumsum(table[::-1], axis=0)[::-1], axis=1)
        length_s = ends[None, :] - begins[:, None]
        capacity_s = resource.instances * np.maximum(length_s, 0.0)
        excess_s = np.where(
            inside_s > capacity_s * (1.0 + CLOSE) + 1e-9, inside_s - capacity_s, 0.0
        )
        return _worst(number, begins, ends, excess_s, length_s)


def _worst(
    number: int, begins: Floats, ends: Floats, excess_s: Floats, length_s: Floats
) -> list[_Interval]:
    """Returns the few worst intervals of each power of two of length."""
    found = []
    scale = np.floor(np.log2(np.maximum(length_s, SMALLEST_INTERVAL_S)))
    for power in np.unique(scale[excess_s > 0.0]):
        worst = np.where(scale == power, excess_s, 0.0)
        for _ in range(PER_LENGTH):
            row, column = np.unravel_index(int(worst.argmax()), worst.shape)
            if worst[row, column] <= 0.0:
                break
            begin_s, end_s = begins.item(int(row)), ends.item(int(column))
            found.append(_Interval(number, begin_s, end_s))
            # The next interval must lie elsewhere.
            apart = (ends[None, :] <= begin_s) | (begins[:, None] >= end_s)
            worst = np.where(apart, worst, 0.0)
    return found


def _endpoints(instants_s: Floats) -> Floats:
    """Returns at most MOST_ENDPOINTS of the instants, including the first and the last."""
    distinct = np.unique(instants_s)
    if len(distinct) <= MOST_ENDPOINTS:
        return np.asarray(distinct)
    chosen = np.linspace(0, len(distinct) - 1, MOST_ENDPOINTS).round().astype(int)
    return np.asarray(distinct[chosen])
