"""Boosted trees as the head of a model: they map the embedding of an ECG to logits.

    trees = Trees(nodes, trees, outputs)       # zeros, until weights are loaded or assigned
    trees.require_valid(width)                         # LoadError unless every path ends at a leaf
    trees(c_RD)                                # logits [R, outputs]

All trees are one list of nodes. At each, a number goes to the first of three nodes if it is at most
`threshold`, to the second if it is above, to the third if it is missing: NaN, or exactly 0, as
what is measured in a lead that is not there. The children stand further down in the list; a leaf
is its own child. Nothing but arrays is stored, so loading runs no code.
"""

import torch
from torch import Tensor, nn

from omnilead.engine.model.folder import LoadError

MAX_DEPTH = 64
ROWS_PER_BATCH = 64  # number of rows that are scored at a time


class Trees(nn.Module):
    """Trees, each of which adds the value of a leaf to the logits of one output."""

    feature: Tensor
    child: Tensor
    root: Tensor
    output: Tensor

    def __init__(self, nodes: int, trees: int, outputs: int) -> None:
        super().__init__()
        self.outputs, self.depth = outputs, 0
        for name, shape in (
            ("feature", (nodes,)),
            ("child", (nodes, 3)),
            ("root", (trees,)),
            ("output", (trees,)),  # number of the output that each tree adds to
        ):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int64))
        self.threshold = nn.Parameter(torch.zeros(nodes), requires_grad=False)
        self.value = nn.Parameter(torch.zeros(nodes), requires_grad=False)

    def require_valid(self, width: int) -> "Trees":
        """Raises LoadError unless every path from a root ends at a leaf, and all numbers are in
        range for embeddings of this width. Returns the trees."""
        own = torch.arange(len(self.feature))[:, None]
        leaf = (self.child == own).all(1, keepdim=True)
        for name, bad in (
            ("feature", (self.feature < 0) | (self.feature >= width)),
            ("child", (self.child >= len(own)) | ((self.child <= own) & ~leaf)),
            ("root", (self.root < 0) | (self.root >= len(own))),
            ("output", (self.output < 0) | (self.output >= self.outputs)),
            ("threshold", ~self.threshold.isfinite()),
            ("value", ~self.value.isfinite()),
        ):
            if bad.any():
                raise LoadError(
                    f"head.{name}: a value is out of range: omnilead did not write these trees"
                )
        nodes = self.root.unique()
        while not leaf[nodes].all():
            nodes = self.child[nodes].unique()
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise LoadError(f"head.child: a tree is deeper than {MAX_DEPTH} levels")
        return self

    def forward(self, c_RD: Tensor) -> Tensor:
        return torch.cat([self._score_rows(part) for part in c_RD.float().split(ROWS_PER_BATCH)])

    def _score_rows(self, c_RD: Tensor) -> Tensor:
        missing_RD = c_RD.isnan() | (c_RD == 0)
        at_RT = self.root.expand(len(c_RD), -1)
        for _ in range(self.depth):
            feature_RT = self.feature[at_RT]
            above_RT = c_RD.gather(1, feature_RT) > self.threshold[at_RT]
            way_RT = above_RT.long().masked_fill(missing_RD.gather(1, feature_RT), 2)
            at_RT = self.child[at_RT, way_RT]
        return c_RD.new_zeros(len(c_RD), self.outputs).index_add(1, self.output, self.value[at_RT])
