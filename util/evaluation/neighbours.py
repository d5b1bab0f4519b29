"""Exact nearest neighbours by blocks of matrix products, and the votes of neighbours.

A fast scan in float32 finds candidates. Their distances are then computed again in float64, as sums of squared
differences, and ranked by distance and, where distances are equal, by index. The scan's rounding cannot change the
result, nor can the size of the blocks: see `search`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from util.cli import tracked
from util.misc import gather_rows, share_of_rank

GROUP = 64  # scores of which first the smallest is taken; also the unit of a block's width
SPARE = 8  # candidates beyond the neighbours asked for, so that rounding seldom leaves a query in doubt
CANDIDATE_ELEMENTS = 2**18  # of candidates' features in one computation: two megabytes, which caches hold


@dataclass
class Rows:
    """Feature vectors [N, D] that are moved to a device block by block, scaled to length one for cosine distances."""

    features: torch.Tensor
    device: torch.device | str
    unit_length: bool

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: slice | torch.Tensor) -> torch.Tensor:
        rows = self.features[index].to(self.device)
        return torch.nn.functional.normalize(rows.double(), dim=-1).float() if self.unit_length else rows.float()


def nearest_neighbours(
    train: torch.Tensor,
    queries: torch.Tensor,
    k: int,
    *,
    cosine: bool = False,
    device: torch.device | str = "cpu",
    block_mb: float = 256,
    header: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances (float64) and indices of each query's neighbours in `train`, both [M, k] and nearest first.

    train [N, D] and queries [M, D] are float32 and stay where they are; blocks of about `block_mb` go to `device`.
    Processes share the queries, and each gets all of the result. The distance is Euclidean or, with `cosine`, one minus
    the cosine similarity. `header` asks for a progress bar of that name.
    """
    mine = Rows(queries[share_of_rank(len(queries))], device, cosine)
    rows, columns = block_shape(block_mb, len(mine), *train.shape)
    scan = Scan(Rows(train, device, cosine), rows, columns)
    starts = range(0, len(mine), rows)
    squares, found = [torch.empty(0, k, dtype=torch.float64)], [torch.empty(0, k, dtype=torch.int64)]
    for start in tracked(starts, header, len(starts), rows, "queries/s"):
        square, index = search(scan, mine[start : start + rows], k)
        squares.append(square.cpu())
        found.append(index.cpu())
    squares, found = gather_rows(torch.cat(squares)), gather_rows(torch.cat(found))
    # Between vectors of length one, half the squared Euclidean distance is the cosine distance.
    return squares / 2 if cosine else squares.sqrt(), found


def block_shape(block_mb: float, num_queries: int, num_train: int, width: int) -> tuple[int, int]:
    """Queries and training vectors of a block: its scores, and the vectors twice (centred or not), fill `block_mb`."""
    floats = block_mb * 2**20 / 4
    rows = max(min(num_queries, 4096, int(floats / 128)), 1)
    columns = min(num_train, int(floats / (rows + 2 * width)))
    return rows, max(columns // GROUP * GROUP, min(num_train, GROUP))  # odd widths also slow the product down


class Scan:
    """What the scan needs to know of the training vectors, computed once for all queries.

    |q - t|^2 = |q|^2 + |t|^2 - 2 q.t, but float32 computes it with an error of up to slack (|q|^2 + |t|^2), where slack
    is of the order of D times the unit round-off. Ranking by |t|^2 (1 - slack) - 2 q.t therefore ranks by lower bounds.
    Subtracting a common centre first changes no distance and makes the norms, and with them the doubt, small.
    """

    def __init__(self, train: Rows, rows: int, columns: int):
        self.train, self.columns = train, columns
        self.centre = train[:columns].mean(dim=0)
        self.slack = 2 * (len(self.centre) + 8) * 2.0**-24
        norms = torch.cat([squared_norms(block - self.centre) for _, block in blocks(train, columns)])
        self.norms = (norms * (1 - self.slack)).float()  # [N]
        # Buffers: memory that is fetched anew for every block costs a quarter of the time.
        self.scores = torch.empty(rows * columns, device=train.device)
        self.centred = torch.empty(columns, len(self.centre), device=train.device)

    def candidates(self, queries: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates [M, number] of queries [M, D], and a lower bound [M] of the squared distance to all others."""
        queries = queries - self.centre
        best = torch.full((len(queries), number), torch.inf, device=queries.device)
        found = torch.zeros(len(queries), number, dtype=torch.int64, device=queries.device)
        for start, block in blocks(self.train, self.columns):
            centred = torch.sub(block, self.centre, out=self.centred[: len(block)])
            scores = self.scores[: len(queries) * len(block)].view(len(queries), len(block))
            torch.addmm(self.norms[start : start + len(block)], queries, centred.T, alpha=-2, out=scores)
            values, index = smallest(scores, number)
            best, chosen = torch.cat([best, values], dim=1).topk(number, largest=False)
            found = torch.cat([found, index + start], dim=1).gather(1, chosen)
        if number == len(self.train):
            return found, torch.full_like(best[:, 0], torch.inf)
        return found, best[:, -1].double() + squared_norms(queries) * (1 - self.slack)


def blocks(train: Rows, columns: int) -> Iterator[tuple[int, torch.Tensor]]:
    for start in range(0, len(train), columns):
        yield start, train[start : start + columns]


def squared_norms(rows: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(rows, dim=1).double().square()


def search(scan: Scan, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared distances (float64) and indices of the `k` training vectors nearest to `queries` [M, D], both [M, k].

    What the scan passes over is at least as far away as `bound` says. Where the k-th neighbour is nearer than that,
    nothing was missed; the few queries that are left in doubt are searched again without a scan.
    """
    candidates, bound = scan.candidates(queries, min(k + SPARE, len(scan.train)))
    squares, candidates = rank(squared_distances(scan.train, queries, candidates), candidates, k)
    for i in (bound <= squares[:, -1]).nonzero().flatten().tolist():
        squares[i], candidates[i] = search_without_scan(scan.train, queries[i], k, scan.columns)
    return squares, candidates


def smallest(scores: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `number` smallest scores of each row [M, C], and where they are; all of a shorter row.

    As `topk`, which is slow on long rows: it looks only into the `number` groups of columns with the smallest minima,
    because they hold what is wanted.
    """
    rows, columns = scores.shape
    if columns % GROUP or columns <= 2 * number * GROUP:
        return scores.topk(min(number, columns), largest=False)
    groups = scores.view(rows, columns // GROUP, GROUP)
    chosen = groups.amin(dim=2).topk(number, largest=False).indices  # [M, number]
    row_start = torch.arange(rows, device=scores.device)[:, None] * (columns // GROUP)
    within = groups.flatten(0, 1).index_select(0, (row_start + chosen).flatten()).view(rows, number * GROUP)
    values, index = within.topk(number, largest=False)
    return values, chosen.gather(1, index // GROUP) * GROUP + index % GROUP


def squared_distances(train: Rows, queries: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Of each query [M, D] to its candidates [M, K]: float64 [M, K], free of cancellation."""
    rows = max(CANDIDATE_ELEMENTS // (candidates.shape[1] * queries.shape[1]), 1)
    parts = [
        train[index.to(train.features.device)].double().sub_(query.double()[:, None]).square_().sum(dim=2)
        for query, index in zip(queries.split(rows), candidates.split(rows), strict=True)
    ]
    return torch.cat(parts)


def rank(squares: torch.Tensor, candidates: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` nearest of each row [M, K], by distance, then by index."""
    candidates, order = candidates.sort(dim=1)
    squares, by_distance = squares.gather(1, order).sort(dim=1, stable=True)
    return squares[:, :k], candidates.gather(1, by_distance)[:, :k]


def search_without_scan(train: Rows, query: torch.Tensor, k: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `search`, for one query [D], with the distance to every row of `train` in float64."""
    parts = [block.double().sub_(query.double()).square_().sum(dim=1) for _, block in blocks(train, columns)]
    squares, index = torch.cat(parts).sort(stable=True)
    return squares[:k], index[:k]


def vote(labels: torch.Tensor, weights: torch.Tensor, num_classes: int) -> torch.Tensor:
    """The class [M] with the largest sum of weights among the neighbours' labels [M, K], nearest first.

    Of classes with equal sums, the one whose nearest member is nearest wins.
    """
    predicted = []
    for label, weight in zip(labels.split(4096), weights.double().split(4096), strict=True):
        sums = torch.zeros(len(label), num_classes, dtype=torch.float64, device=label.device)
        of_neighbour = sums.scatter_add_(1, label, weight).gather(1, label)  # [m, K]: the sum of each one's class
        predicted.append(label.gather(1, of_neighbour.argmax(dim=1, keepdim=True))[:, 0])
    return torch.cat(predicted)


def inverse_distance(distances: torch.Tensor) -> torch.Tensor:
    """Weights 1 / d [M, K]; where a query coincides with neighbours, only those count."""
    coincides = distances == 0
    return torch.where(coincides.any(dim=1, keepdim=True), coincides.double(), 1 / distances)
