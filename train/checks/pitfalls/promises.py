"""What each lesson promises: the mistake, what it costs, and the figures of both halves, worked out on paper.

Free of torch. The lessons themselves are the files beside this one, `<name>.py`: `wrong` and `right` on real ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from train.seam import Exit

RANKS = 2
"""What all figures are worked out for."""


@dataclass(frozen=True)
class Lesson:
    """One mistake, and what is to be seen of it."""

    mistake: str
    costs: str
    figure: str
    """What is measured."""
    right: float
    """The figure of the right half."""
    wrong: float | str
    """The figure of the wrong half; words: it never comes to its end, and why."""
    why: str
    """Where the figures come from."""
    here: tuple[str, str]
    """What Muster does about it: file:function, and in words."""
    ends_with: tuple[Exit, ...] = (Exit.HANG,)
    """The agent's exit codes that a wrong half may have which never comes to its end."""

    @property
    def hangs(self) -> bool:
        """Whether the wrong half never comes to its end."""
        return isinstance(self.wrong, str)


def is_as_promised(figure: float, promised: float) -> bool:
    """To what float32 and a printed page allow."""
    return math.isclose(figure, promised, rel_tol=1e-4, abs_tol=1e-5)


LESSONS = {
    "rank_zero_learning_rate": Lesson(
        "rank 0 alone changes its learning rate",
        "the replicas drift apart, and nothing says so",
        "largest difference between the ranks' weights",
        right=0.0,
        # The mean weight shrinks by the mean rate; the difference grows by the rates' difference times that mean.
        wrong=0.05 * 0.9**5 * (1 - 0.925**5) / 0.075,
        why="five steps shrink the weight by a tenth each; in the next five the ranks' rates differ by 0.05",
        here=("train/loop.py:fit", "the rate follows from the step alone; check_replicas compares the weights"),
    ),
    "rank_zero_validation": Lesson(
        "rank 0 alone validates, through the DDP wrapper",
        "a hang until somebody kills the job",
        "difference from the loss of one process that validates alone",
        right=0.0,
        wrong="rank 0 broadcasts its buffers once more than the others expect it",
        why="each sample is on one rank",
        here=("train/loop.py:evaluate", "all ranks evaluate, each its own samples, with the bare model"),
    ),
    "forgotten_set_epoch": Lesson(
        "the sampler is never told the epoch",
        "every epoch has the same batches in the same order",
        "different orders in three epochs",
        right=3.0,
        wrong=1.0,
        why="one order for ever, or one for each epoch",
        here=("train/data/order.py:Order.batch", "the order follows from seed and epoch: there is nothing to forget"),
    ),
    "missing_no_sync": Lesson(
        "gradients are sent after each micro-batch",
        "the traffic of every step, so many times over, for the same result",
        "all-reduces of gradients for each update",
        right=1.0,
        wrong=4.0,
        why="four micro-batches, one bucket",
        here=("train/strategies/ddp.py:DistributedDataParallel.hold_gradients", "no_sync but for the last micro-batch"),
    ),
    "clipping_before_unscale": Lesson(
        "gradients are clipped while they are still scaled",
        "steps 65536 times too small: the loss hardly moves",
        "length of the step, where the limit is 1 and the gradient 5",
        right=1.0,
        wrong=1 / 65536,
        why="cut to length 1 and divided by the scale of 65536, or divided first",
        here=("train/precision.py:Precision.unscale", "the loop unscales, corrects by the true count, then clips"),
    ),
    "nominal_window": Lesson(
        "the last, partial window is divided by the size of a full one",
        "an epoch's last step is too small",
        "the last window's gradient as a share of what it should be",
        right=1.0,
        wrong=1 / 4,
        why="one micro-batch is left of five, and is divided by four",
        here=("train/loop.py:fit", "the sum of the losses is divided by the items that there were"),
    ),
    "leftover_gradients": Lesson(
        "the last, partial window takes no step, and its gradients stay",
        "they are added to the next epoch's first step",
        "the second epoch's first gradient beside the first epoch's, on the same data",
        right=1.0,
        wrong=(2.5 + 1.5) / 2.5,
        why="(1 + 2 + 3 + 4) / 4 is 2.5, and the 6 / 4 left over is 1.5",
        here=("train/loop.py:fit", "each window ends with a step, also a partial one"),
    ),
    "padded_evaluation": Lesson(
        "a DistributedSampler shares out the validation set",
        "samples count twice; the metric depends on the number of ranks",
        "mean loss of seven samples with losses 1, 4, 9 and so on to 49",
        right=20.0,
        wrong=(140 + 1) / 8,
        why="140 / 7, or with the first sample once more (140 + 1) / 8",
        here=("train/data/loading.py:evaluation_batches", "each sample on one rank, once"),
    ),
    "uneven_inputs": Lesson(
        "one rank has a batch more than the other",
        "a hang in an epoch's last step",
        "the weight after three steps from 0",
        right=-9.0,
        wrong="rank 0 waits for gradients of a batch that rank 1 does not have",
        why="each step goes down by the mean of all inputs: (1+4)/2 + (2+5)/2 + 3/1 = 9",
        here=("train/data/loading.py:GlobalBatchSampler.window", "a sample that counts for nothing stands in"),
    ),
    "different_seeds": Lesson(
        "the ranks begin with different weights, and average gradients by hand",
        "the replicas stay as far apart as they began",
        "what lies between the ranks' parameters, as a share of what their seeds put there",
        right=0.0,
        wrong=1.0,
        why="equal gradients move all ranks by the same: nothing changes between them",
        here=("train/strategies/manual.py:Manual.wrap", "rank 0's weights and buffers go to all ranks first"),
    ),
    "unsynchronised_batchnorm": Lesson(
        "BatchNorm on each rank sees that rank's samples alone",
        "what a sample becomes depends on who shares its rank",
        "largest difference from one process that sees all samples",
        right=0.0,
        # 0, 2, 10, 12 have mean 6 and variance 26; 0 and 2 alone have mean 1 and variance 1.
        wrong=1 + 4 / math.sqrt(26),
        why="2 becomes (2 - 1) / 1 among its rank's 0 and 2, and (2 - 6) / √26 among 0, 2, 10 and 12",
        here=("train/strategies/base.py:Strategy.sync_buffers", "running statistics are rank 0's; else SyncBatchNorm"),
    ),
    "mismatched_collectives": Lesson(
        "the ranks meet in collectives that are not the same",
        "an error with luck; else a hang, or numbers taken for others",
        "sum of all numbers after the all-reduce",
        right=9.0,
        wrong="rank 0 sends three numbers, rank 1 two",
        why="(1 + 1) + (2 + 2) + (3 + 0) = 9",
        here=("train/collective_errors.py:in_words", "says what it means where sizes differ"),
        ends_with=(Exit.RANK_FAILED, Exit.HANG),
    ),
    "barrier_in_a_branch": Lesson(
        "a barrier that only some ranks come to",
        "a hang until somebody kills the job",
        "checkpoints written, as all ranks know it",
        right=1.0,
        wrong="rank 0 waits in the barrier, rank 1 in the all-reduce behind it",
        why="one rank wrote one",
        here=("train/saver.py:Saver", "collectives stand outside of branches on the rank"),
    ),
    "unreduced_metrics": Lesson(
        "rank 0 prints its own loss as the loss",
        "a curve of some of the data; gradients are right, so nobody looks",
        "the loss that is printed",
        right=4.0,
        wrong=2.0,
        why="(1 + 2 + 3 + 10) / 4, or (1 + 2 + 3) / 3",
        here=("train/tally.py:Tally", "sum and count of all ranks, in one all-reduce a step"),
    ),
}  # fmt: skip
