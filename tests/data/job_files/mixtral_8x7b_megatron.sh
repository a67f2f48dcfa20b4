#!/bin/bash
# Arguments of Mixtral 8x7B; the launcher's own arguments are ignored.
torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py \
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 \
    --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall \
    --seq-length 4096 --max-position-embeddings 32768 --micro-batch-size 1 --global-batch-size 256 \
    --normalization RMSNorm --disable-bias-linear --swiglu --position-embedding-type rope \
    --untie-embeddings-and-output-weights --vocab-size=32000 --bf16 \
    --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --use-distributed-optimizer
