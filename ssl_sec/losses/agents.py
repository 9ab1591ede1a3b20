"""The error of comparing rows with the agents of classes instead of with each other (NormFace, Proposition 3).

With rows f_j, the agent W of the class of f_j, and d the Euclidean distance of directions, the distances of a row f_0
are distorted by

    (1/n) Σ_j (d(f_0, f_j) − d(f_0, W))²  ≤  (1/n) Σ_j d(f_j, W)²

The paper has the sums over one class and one f_0. Here they are over all rows of a batch but f_0, and averaged over
every row as f_0: the bound is then the mean squared distance of the batch's rows to their agents.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ssl_sec.losses.averages import Averages
from ssl_sec.losses.base import Embeddings, Scalar
from ssl_sec.losses.geometry import directions, root

# Weight of a step in the moving averages, for which the paper states none.
RATE = 0.01


@torch.no_grad()
def agent_distortion(embeddings: Embeddings, agents: Embeddings, anchors: slice = slice(None)) -> Scalar:
    """The mean squared error of the rows' distances if agents stand for the rows; a share of it, as for a loss.

    Args:
        embeddings: rows of the global batch, of any norm.
        agents: the agent of each row's class, of any norm.
        anchors: the range of rows taken as f_0; the shares of a partition add up.
    """
    rows, agents = directions(embeddings), directions(agents)
    between, to_agents = (root(2 - 2 * rows[anchors] @ others.T) for others in (rows, agents))
    errors = (between - to_agents).square()
    count = len(rows)
    # A row is not compared with itself.
    places = torch.arange(count, device=rows.device)[anchors].unsqueeze(1)
    return errors.scatter(1, places, 0.0).sum() / max(count * (count - 1), 1)


@torch.no_grad()
def agent_distortion_bound(embeddings: Embeddings, agents: Embeddings) -> Scalar:
    """The mean squared distance of the rows to their agents, which the distortion does not exceed.

    Arguments as for `agent_distortion`.
    """
    return (2 - 2 * (directions(embeddings) * directions(agents)).sum(1)).mean()


class AgentDistortion(Averages):
    """The distortion and its bound as moving averages over the steps of training.

    Attributes:
        distortion: moving average over the batches, the latest weighted by `RATE`; 0 before the first.
        bound: moving average of the bound, likewise.
    """

    distortion: Tensor
    bound: Tensor

    def __init__(self) -> None:
        super().__init__(RATE, "distortion", "bound")
        self.register_load_state_dict_pre_hook(_start_anew)  # pyright: ignore[reportUnknownMemberType]


def _start_anew(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Checkpoints of version 0.1 have no averages."""
    for name, buffer in module.named_buffers():
        state.setdefault(prefix + name, buffer)
