#!/bin/bash
#SBATCH --job-name=compress
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120

# One task per GPU, without torchrun, so that the job step ends with the exit code of compress. --signal ends the tasks
# two minutes before the time is over; a job that was preempted or ran out of time is queued again, and continues. Only
# the first task writes RUN: after a requeue it must still be there, on whichever node that task then runs.
RUN=${RUN:-$SLURM_SUBMIT_DIR/runs/sst2}
OPTIONS=(--teacher bert-base --recipe tinybert --data glue/sst2)

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500}
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0    # if nodes have several networks
export COMPRESS_HOME=${COMPRESS_HOME:-/tmp/compress-$USER}    # may be a local disk of each node

srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
    export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
    if [ -e "$0/run.json" ]; then set -- "$@" --resume; fi
    exec compress distill --out "$0" "$@"' "$RUN" "${OPTIONS[@]}" "$@"
code=$?
if [ $code -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
