#!/usr/bin/env bash
# Train with torchrun on one node or on several.
#
# One node, a process for each of its GPUs:
#   examples/launch/torchrun.sh examples/stdlib/train.py fit --config=examples/stdlib/config.yaml --trainer.devices=8
# Two nodes: the same command on both, with the address of the first and the number of nodes for the Trainer too:
#   NNODES=2 MASTER_ADDR=10.0.0.1 examples/launch/torchrun.sh ... --trainer.num_nodes=2 --trainer.devices=8
#
# NPROC_PER_NODE   processes of a node (default: one for each GPU; give a number on CPUs); equals Trainer(devices=...)
# MASTER_PORT      a free port of the first node (default 29500; with one node any free one is taken)
# MAX_RESTARTS     how often all processes are started again after one has failed (default 0)
# LOCAL_ADDR       this node's address, where its host name is not known to the others
set -euo pipefail

: "${NNODES:=1}" "${NPROC_PER_NODE:=gpu}" "${MAX_RESTARTS:=0}" "${MASTER_PORT:=29500}"

if [ "$NNODES" = 1 ]; then
    meeting=(--standalone)
else
    : "${MASTER_ADDR:?set MASTER_ADDR to the address of the first node}"
    meeting=(--rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id=dcp)
    if [ -n "${LOCAL_ADDR:-}" ]; then meeting+=(--local-addr="$LOCAL_ADDR"); fi
fi

exec python -m torch.distributed.run --nnodes="$NNODES" --nproc-per-node="$NPROC_PER_NODE" \
    --max-restarts="$MAX_RESTARTS" "${meeting[@]}" "$@"
