"""Whole blocks, attention and its MoE layer, in micro-batches that overlap (`fusedmoe.pipeline`).

A batch's way through the blocks, by the tasks of two plans:

1. `PipelinedBlocks.forward` (`pipeline.py`) checks the batch; `MoEBlock.begin` makes each block's state, and `cut`
   (`cuts.py`) says where its micro-batches are.
2. attention: `BlocksForward.attention` (`forward.py`) runs dense part and gate of each dense micro-batch
   (`MoEBlock.dense`, in `moe_block.py`), and gives rows their places; with a capacity and k > 1 the task permute does.
3. dispatch: `BlocksForward.start` joins the rows of a chunk (`Sent`, in `cuts.py`), tells the ranks how many come
   (`MoEBlock.exchange`), and `Pass.dispatch` (`engine/run.py`) sends them.
4. all-gather, expert, reduce-scatter: `engine/run.py`, as in a layer by itself.
5. combine: `Pass.combine` brings results back, and `BlocksForward.finish` adds them to the block's output.
6. The auxiliary loss is that of the whole batch (`BlocksForward._whole_gate`).
7. `BlocksBackward` (`backward.py`) has the same tasks for gradients: `start` and `finish` of a chunk, and attention
   goes back through each dense micro-batch's graph. `state.py` has what the passes hand each other.

Decoder blocks of other libraries take the same way; `external_blocks.py` has them call it.
"""
