"""Blocks of attention and a MoE layer, run in micro-batches that overlap (`fusedmoe.pipeline`).

A batch passes through the tasks of two plans:

1. `read_batch` (`batch.py`) checks the batch. `MoEBlock.begin` creates each block's state; `cut` (`cuts.py`) splits the
   batch into micro-batches.
2. attention: `BlocksForward.attention` (`forward.py`) runs dense part and gate of each dense micro-batch
   (`DenseRunner.run` in `dense_part.py`), and sorts the rows. With a capacity and k > 1, the permute task sorts them.
3. dispatch: `BlocksForward.prepare_rows` joins the rows of a chunk (`SendOrder` in `cuts.py`) and exchanges metadata
   (`MoEBlock.exchange`); `PassRun.dispatch` (`engine/run.py`) sends the rows.
4. all-gather, expert, reduce-scatter: `engine/run.py`, as in a single layer.
5. combine: `PassRun.combine` sends the results back; `BlocksForward.store_results` adds them to the block's output.
6. The auxiliary loss is computed for the whole batch (`BatchRouting.aux_loss`).
7. `BlocksBackward` (`backward.py`) runs the same tasks for gradients, from the state that forward has saved
   (`state.py`); attention differentiates the graph of each dense micro-batch.

`external_blocks.py` runs decoder blocks of other libraries the same way.
"""
