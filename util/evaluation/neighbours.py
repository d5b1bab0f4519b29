"""Exact nearest neighbours by blocked matrix products, and the votes of neighbours.

A float32 scan selects candidates by lower bounds on their distances; float64 distances rank them, and indices break
ties. Neither rounding in the scan nor the block size affects the result: see `Scan.search`.
"""

from collections.abc import Iterator

import torch

from util.cli import tracked
from util.misc import full_float32, gather_rows, get_world_size, share_of_rank

GROUP = 64  # scores that are first reduced to their minimum; block widths are multiples of this
SPARE = 8  # candidates beyond the neighbours asked for, so that rounding seldom leaves a query in doubt
CANDIDATE_ELEMENTS = 2**18  # candidates' features per float64 computation: two megabytes, which fit in a cache


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
    Processes share the queries, and each gets the whole result. `header` is the title of a progress bar, if wanted.
    """
    mine = queries[share_of_rank(len(queries))]
    rows, columns = block_shape(block_mb, len(mine), *train.shape)
    scan = Scan(train, rows, columns, device, cosine)
    blocks = mine.split(rows)
    with full_float32():  # the error bounds assume float32
        shown = tracked(blocks, header, len(blocks), rows * get_world_size(), "queries/s")
        parts = [scan.search(scan.load(block), k) for block in shown]
    squares, found = (gather_rows(torch.cat(part).cpu()) for part in zip(*parts, strict=True))
    return squares / 2 if cosine else squares.sqrt(), found  # of unit vectors, half the square is 1 - cosine


def block_shape(block_mb: float, num_queries: int, num_train: int, width: int) -> tuple[int, int]:
    """Queries and training vectors per block, whose scores and two copies of vectors (one centred) fill `block_mb`."""
    floats = block_mb * 2**20 / 4
    rows = max(min(num_queries, 4096, int(floats / 128)), 1)
    columns = min(num_train, int(floats / (rows + 2 * width)))
    return rows, max(columns // GROUP * GROUP, min(num_train, GROUP))  # odd widths also slow the product down


class Scan:
    """The training vectors, and what a scan needs to know about them, computed once for all queries.

    |q - t|^2 = |q|^2 + |t|^2 - 2 q.t, but float32 computes it with an error of up to slack (|q|^2 + |t|^2), where slack
    is of the order of D times the unit round-off. Ranking by |t|^2 (1 - slack) - 2 q.t therefore ranks by lower bounds.
    Subtracting a common centre first changes no distance, but shrinks the norms and with them the error.
    """

    def __init__(self, train: torch.Tensor, rows: int, columns: int, device: torch.device | str, cosine: bool):
        self.train, self.columns, self.device, self.cosine = train, columns, device, cosine
        self.centre = self.load(train[:columns]).mean(dim=0)
        self.slack = 2 * (len(self.centre) + 8) * 2.0**-24
        norms = torch.cat([squared_norms(block - self.centre) for _, block in self.blocks()])
        self.norms = (norms * (1 - self.slack)).float()  # [N]
        # Buffers: reallocating this memory for every block would cost a quarter of the time.
        self.scores = torch.empty(rows * columns, device=device)
        self.centred = torch.empty(columns, len(self.centre), device=device)

    def load(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors [..., D] as float32 on the device, of unit length for cosine distances."""
        vectors = vectors.to(self.device)
        return torch.nn.functional.normalize(vectors.double(), dim=-1).float() if self.cosine else vectors.float()

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        for start in range(0, len(self.train), self.columns):
            yield start, self.load(self.train[start : start + self.columns])

    def search(self, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared distances (float64) and indices of the `k` training vectors nearest to queries [M, D], both [M, k].

        No vector that the scan discards is nearer than `bound`. A k-th neighbour below it proves that none was missed;
        the few remaining queries are compared with all training vectors.
        """
        candidates, bound = self.candidates(queries, min(k + SPARE, len(self.train)))
        rows = max(CANDIDATE_ELEMENTS // (candidates.shape[1] * queries.shape[1]), 1)
        parts = zip(queries.split(rows), candidates.to(self.train.device).split(rows), strict=True)
        squares = torch.cat([squared_distances(self.load(self.train[at]), query[:, None]) for query, at in parts])
        squares, order = squares.sort(dim=1, stable=True)
        squares, found = squares[:, :k], candidates.gather(1, order)[:, :k]
        for i in (bound <= squares[:, -1]).nonzero().flatten().tolist():
            squares[i], found[i] = self.search_all(queries[i], k)
        return squares, found

    def search_all(self, query: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `search`, for one query [D], without a scan."""
        squares, found = torch.cat([squared_distances(block, query) for _, block in self.blocks()]).sort(stable=True)
        return squares[:k], found[:k]

    def candidates(self, queries: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates [M, number], by index, and a lower bound [M] of the squared distance to all other vectors."""
        queries = queries - self.centre
        best = torch.full((len(queries), number), torch.inf, device=queries.device)
        found = torch.zeros(len(queries), number, dtype=torch.int64, device=queries.device)
        for start, block in self.blocks():
            centred = torch.sub(block, self.centre, out=self.centred[: len(block)])
            scores = self.scores[: len(queries) * len(block)].view(len(queries), len(block))
            torch.addmm(self.norms[start : start + len(block)], queries, centred.T, alpha=-2, out=scores)
            values, index = smallest(scores, number)
            best, chosen = torch.cat([best, values], dim=1).topk(number, largest=False)
            found = torch.cat([found, index + start], dim=1).gather(1, chosen)
        bound = best.amax(dim=1).double() + squared_norms(queries) * (1 - self.slack)
        return found.sort(dim=1).values, bound if number < len(self.train) else torch.full_like(bound, torch.inf)


def squared_norms(vectors: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(vectors, dim=1).double().square()


def squared_distances(vectors: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return vectors.double().sub_(query.double()).square_().sum(dim=-1)


def smallest(scores: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `number` smallest scores of each row [M, C], and their columns; all of a shorter row."""
    rows, columns = scores.shape
    if columns % GROUP or columns <= 2 * number * GROUP:
        return scores.topk(min(number, columns), largest=False)
    # topk is slow on long rows. The groups with the smallest minima contain the result, so the others can be skipped.
    groups = scores.view(rows, columns // GROUP, GROUP)
    chosen = groups.amin(dim=2).topk(number, largest=False).indices  # [M, number]
    flat = chosen + torch.arange(rows, device=scores.device)[:, None] * (columns // GROUP)
    within = groups.flatten(0, 1).index_select(0, flat.flatten()).view(rows, -1)  # ten times as fast as gather
    values, index = within.topk(number, largest=False)
    return values, chosen.gather(1, index // GROUP) * GROUP + index % GROUP


def vote(labels: torch.Tensor, weights: torch.Tensor, num_classes: int) -> torch.Tensor:
    """The class [M] with the largest sum of weights among labels [M, K], nearest first; the nearest wins ties."""
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
